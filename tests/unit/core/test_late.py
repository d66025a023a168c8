"""A servicer that comes after its server."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.late import LateService
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer
from smg_grpc_servicer.kv_events.cursor import too_early
from smg_grpc_servicer.testing import FakeEngine
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.servicers import servicer_for

SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]
ADD = vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server


@pytest.fixture
def board() -> StatusBoard:
    return StatusBoard()


@pytest.fixture
def late(board: StatusBoard) -> LateService:
    return LateService(ADD, SERVICE.methods_by_name, board)


@pytest.fixture
async def channel(board: StatusBoard, late: LateService) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer(ServerOptions(), board)
    server.add(late.add_to)
    address = await server.bind()
    try:
        async with grpc.aio.insecure_channel(str(address)) as channel:
            yield channel
    finally:
        await server.stop(0)


async def generate(channel: grpc.aio.Channel) -> list[vllm_engine_pb2.GenerateResponse]:
    request = vllm_engine_pb2.GenerateRequest(
        request_id="one",
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[5, 6, 7]),
        sampling_params=vllm_engine_pb2.SamplingParams(max_tokens=3),
    )
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    return [answer async for answer in stub.Generate(request, timeout=10)]


async def test_before_it_is_there_every_rpc_ends_unavailable_with_the_reason(
    channel: grpc.aio.Channel, board: StatusBoard
) -> None:
    stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
    for name, method in SERVICE.methods_by_name.items():
        request = getattr(vllm_engine_pb2, method.input_type.name, None)
        if request is None:  # a message of the common proto
            continue
        call = getattr(stub, name)(request(), timeout=5)
        assert await call.code() is grpc.StatusCode.UNAVAILABLE, name
        assert await call.details() == "not ready: loading"
    board.dead("out of memory")
    with pytest.raises(grpc.aio.AioRpcError, match="engine dead: out of memory"):
        await generate(channel)


async def test_once_it_is_there_it_answers_streams_and_single_calls(
    channel: grpc.aio.Channel, board: StatusBoard, late: LateService
) -> None:
    engine = FakeEngine()
    late.fill(servicer_for(DIALECTS["vllm"], engine, board))
    await engine.start()
    board.serving()
    try:
        answers = await generate(channel)
        assert len(answers[-1].complete.output_ids) == 3
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        info = await stub.GetModelInfo(vllm_engine_pb2.GetModelInfoRequest(), timeout=5)
        assert info.vocab_size
    finally:
        await engine.close()


def test_it_is_filled_once_and_only_with_all_the_rpcs(late: LateService) -> None:
    with pytest.raises(AttributeError):
        late.fill(object())
    servicer = servicer_for(DIALECTS["vllm"], FakeEngine(), StatusBoard())
    late.fill(servicer)
    with pytest.raises(RuntimeError, match="already"):
        late.fill(servicer)


async def test_a_request_that_no_wait_would_cure_is_told_so(board: StatusBoard) -> None:
    """A KV-event cursor from before belongs to an engine that is gone."""
    late = LateService(ADD, SERVICE.methods_by_name, board, early={"SubscribeKvEvents": too_early})
    server = GrpcServer(ServerOptions(), board)
    server.add(late.add_to)
    address = await server.bind()
    try:
        async with grpc.aio.insecure_channel(str(address)) as channel:
            subscribe = vllm_engine_pb2_grpc.VllmEngineStub(channel).SubscribeKvEvents
            for cursor, code in ((7, "OUT_OF_RANGE"), (0, "UNAVAILABLE")):
                request = common_pb2.SubscribeKvEventsRequest(start_sequence_number=cursor)
                assert (await subscribe(request, timeout=5).code()).name == code
    finally:
        await server.stop(0)


class Recorded:
    """A server that remembers what was added."""

    def __init__(self) -> None:
        self.named: dict[str, dict[str, Any]] = {}

    def add_generic_rpc_handlers(self, handlers: Any) -> None:
        """Not looked at."""

    def add_registered_method_handlers(self, service: str, handlers: dict[str, Any]) -> None:
        self.named[service] = handlers


async def test_single_answers_are_added_by_themselves_too(late: LateService) -> None:
    """Such a method keeps one handler for ever, and it is the real servicer's after all."""
    server: Any = Recorded()
    late.add_to(server)
    assert server.named.keys() == {SERVICE.full_name}
    named = server.named[SERVICE.full_name]
    assert named.keys() == {
        name for name, method in SERVICE.methods_by_name.items() if not method.server_streaming
    }
    engine, filled = FakeEngine(), StatusBoard()
    late.fill(servicer_for(DIALECTS["vllm"], engine, filled))
    await engine.start()
    filled.serving()
    answer = await named["HealthCheck"].unary_unary(vllm_engine_pb2.HealthCheckRequest(), None)
    assert answer.healthy
