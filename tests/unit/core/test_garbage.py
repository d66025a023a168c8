"""Python's search for garbage, which every stream waits for, leaves an engine out."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import Iterator

import pytest

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer, Life
from tests.support.wait import until


@pytest.fixture
def thawed() -> Iterator[None]:
    gc.unfreeze()
    yield
    gc.unfreeze()


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
