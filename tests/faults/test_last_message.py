"""The last message and the status: together on a server of ours, one after the other elsewhere."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import wraps
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.core import wakeups
from smg_grpc_servicer.core.handlers import Handlers
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.mlx.servicer import MlxEngineServicer
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from smg_grpc_servicer.testing.servicers import servicer_for
from tests.support.serving import SERVERS, served
from tests.support.wait import until

MLX = DIALECTS["mlx"]
LARGE = 4000
"""Output tokens of an answer that no connection takes in before somebody reads it: 1.5 MB."""
CLIENT = [
    ("grpc.max_receive_message_length", -1),
    ("grpc.http2.bdp_probe", 0),  # the window stays at 64 KiB
]


def large_answer(channel: grpc.aio.Channel) -> Any:
    request = MLX.generate("large", [5], stream=False, max_tokens=LARGE, logprobs=40)
    return MLX.stub(channel).Generate(request)


class Registered:
    """What generated code gives a server."""

    def __init__(self) -> None:
        self.handlers: list[grpc.GenericRpcHandler] = []

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        self.handlers += handlers

    def add_registered_method_handlers(self, *_: Any) -> None:
        """Nothing."""


class Called:
    method = f"/{MLX.service}/Generate"
    invocation_metadata = ()


def generate_handler(servicer: CoreServicer) -> Any:
    """As a server of ours has it."""
    registered: Any = Registered()
    MLX.registrar()(servicer, registered)
    (given,) = registered.handlers
    return Handlers(given).service(Called())


async def test_generate_is_one_batch_shorter_on_our_server() -> None:
    """gRPC sends what a single-answer handler returns together with its status."""
    handler = generate_handler(servicer_for(MLX, FakeEngine(), StatusBoard()))
    assert not handler.response_streaming
    assert handler.unary_unary is not None


async def test_a_generate_that_somebody_wrote_over_ours_is_kept() -> None:
    class Theirs(MlxEngineServicer):
        async def Generate(self, request: Any, context: Any) -> None:
            await super().Generate(request, context)

    handler = generate_handler(Theirs(FakeEngine(), StatusBoard()))
    assert handler.response_streaming
    assert handler.unary_stream is not None


def watched(generate: Any, seen: list[str]) -> Any:
    @wraps(generate)
    async def watching(*args: Any) -> None:
        seen.append(args[-2].request_id)
        await generate(*args)

    return watching


@pytest.mark.parametrize("on", ["the class", "the instance"])
async def test_a_wrapper_around_generate_is_called(on: str) -> None:
    """An engine's maintainers or a tracer put one there; `wraps` copies all that stands on ours."""
    seen: list[str] = []

    class Theirs(MlxEngineServicer):
        pass

    engine, board = FakeEngine(), StatusBoard()
    servicer = Theirs(engine, board)
    where: Any = Theirs if on == "the class" else servicer
    where.Generate = watched(where.Generate, seen)
    server = wakeups.server()
    MLX.registrar()(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await engine.start()
    board.serving()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        call = MLX.stub(channel).Generate(MLX.generate("one", [5], max_tokens=3))
        assert len([message async for message in call]) > 1
    await server.stop(0)
    await engine.close()
    assert seen == ["one"]


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("choices", [1, 3])
async def test_both_say_the_same(
    make: Callable[..., grpc.aio.Server], stream: bool, choices: int
) -> None:
    dialect = DIALECTS["vllm"]
    async with served(dialect, FakeEngine(), make=make) as server:
        history = await server.generate("one", stream=stream, max_tokens=5, n=choices)
        assert history.code is grpc.StatusCode.OK
        assert len(history.completes) == choices
        for complete in history.completes:
            assert len(complete.output_ids) == 5
            assert complete.finish_reason == "length"


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
async def test_a_large_last_message_waits_for_its_reader(
    make: Callable[..., grpc.aio.Server],
) -> None:
    """The request is over for the engine and for its id, and still counts as unsent."""
    async with (
        served(MLX, FakeEngine(tokens_per_step=100), make=make) as server,
        grpc.aio.insecure_channel(server.address, options=CLIENT) as channel,
    ):
        call = large_answer(channel)
        await until(lambda: server.board.unsent == 1)
        await asyncio.sleep(0.2)
        assert server.servicer.table.in_flight == 0
        assert server.board.in_flight == 1
        complete = await call.read()
        assert len(complete.complete.output_ids) == LARGE
        assert await call.code() is grpc.StatusCode.OK
        await until(lambda: server.board.in_flight == 0)


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
async def test_a_reader_that_leaves_before_the_last_message_is_not_counted_for_ever(
    make: Callable[..., grpc.aio.Server],
) -> None:
    engine = FakeEngine(tokens_per_step=100)
    async with served(MLX, engine, make=make) as server:
        async with grpc.aio.insecure_channel(server.address, options=CLIENT) as channel:
            call = large_answer(channel)
            await until(lambda: server.board.unsent == 1)
            call.cancel()
            await until(lambda: server.board.in_flight == 0)
        assert engine.aborts == []


async def test_a_drain_waits_for_a_last_message_that_is_still_being_sent() -> None:
    """B1: a whole answer is not lost because its reader is slow when SIGTERM comes."""
    engine, board = FakeEngine(tokens_per_step=100), StatusBoard()
    servicer = servicer_for(MLX, engine, board)
    server = GrpcServer(ServerOptions(drain_seconds=30.0), board)
    server.add(lambda grpc_server: MLX.registrar()(servicer, grpc_server), MLX.service)
    address = await server.bind()
    life = Life(engine.start, close=engine.close, cut=servicer.table.cut_all)
    serving = asyncio.ensure_future(server.serve(life))
    await until(lambda: board.accepting)
    async with grpc.aio.insecure_channel(str(address), options=CLIENT) as channel:
        call = large_answer(channel)
        await until(lambda: board.unsent == 1)
        server.request_stop("a test")
        # Longer than what cut calls are given.
        await asyncio.sleep(2.0)
        assert not serving.done()
        complete = await call.read()
        assert len(complete.complete.output_ids) == LARGE
        assert await call.code() is grpc.StatusCode.OK
        assert await asyncio.wait_for(serving, 5) == 0
