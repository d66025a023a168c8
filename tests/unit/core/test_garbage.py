"""Python's search for garbage, which every stream waits for, leaves an engine out."""

from __future__ import annotations

import asyncio
import gc
from collections import Counter
from collections.abc import Iterator

import pytest

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import YOUNG, GrpcServer, Life
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from tests.support.serving import served
from tests.support.wait import until


@pytest.fixture
def thawed() -> Iterator[None]:
    before = gc.get_threshold()
    gc.unfreeze()
    yield
    gc.unfreeze()
    gc.set_threshold(*before)


@pytest.mark.usefixtures("thawed")
async def test_what_is_loaded_when_it_serves_is_not_looked_through_again() -> None:
    loaded: list[list[int]] = []

    async def start() -> None:
        loaded.extend([at] for at in range(1000))

    board = StatusBoard()
    server = GrpcServer(ServerOptions(), board)
    await server.bind()
    assert gc.get_freeze_count() == 0
    running = asyncio.create_task(server.serve(Life(start=start)))
    await until(lambda: board.ready)
    assert gc.get_freeze_count() > 1000
    assert not [seen for seen in gc.get_objects() if seen is loaded[0]]
    server.request_stop("the test is over")
    assert await running == 0


@pytest.mark.usefixtures("thawed")
@pytest.mark.parametrize(
    ("found", "left"),
    [((700, 11, 12), (YOUNG, 11, 12)), ((0, 10, 10), (0, 10, 10)), ((10**6, 5, 5), (10**6, 5, 5))],
    ids=["Python's", "off", "the operator's"],
)
async def test_new_objects_are_looked_through_rarely(
    found: tuple[int, int, int], left: tuple[int, int, int]
) -> None:
    """A step's outputs are many and live for a moment; what somebody chose himself stays."""
    gc.set_threshold(*found)
    board = StatusBoard()
    server = GrpcServer(ServerOptions(), board)
    running = asyncio.create_task(server.serve(Life()))
    await until(lambda: board.ready)
    assert gc.get_threshold() == left
    server.request_stop("the test is over")
    assert await running == 0


async def test_a_request_leaves_nothing_for_the_collector() -> None:
    """Neither ours nor gRPC's call, which holds memory outside Python."""
    async with served(DIALECTS["mlx"], FakeEngine()) as server:
        await server.generate("warm", max_tokens=4)
        gc.collect()
        gc.disable()
        try:
            before = kinds()
            for at in range(20):
                await server.generate(f"r{at}", max_tokens=4)
            await until(lambda: server.board.in_flight == 0)
            await asyncio.sleep(0.05)
            left = kinds() - before
        finally:
            gc.enable()
    assert left["GenerateSpec"] == 20, "the fake engine remembers them"
    for name in ("RPCState", "_ServicerContext", "Choice", "Mailbox", "Writer", "Ticket"):
        assert left[name] < 5, name


def kinds() -> Counter[str]:
    return Counter(type(seen).__name__ for seen in gc.get_objects())
