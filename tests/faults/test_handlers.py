"""Calls whose bytes are no message: the caller's fault, said in one way by every service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.core.handlers import Handlers
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from smg_grpc_servicer.testing.servicers import servicer_for
from tests.support.dial import SERVING, check

MLX = DIALECTS["mlx"]
HEALTH = "grpc.health.v1.Health"
PACKAGE = "mlx.grpc.engine"
GOOD = MLX.generate("one", [5, 6, 7], max_tokens=2).SerializeToString()
METHODS = {
    f"{MLX.service}/Generate": f"{PACKAGE}.GenerateRequest",
    f"{MLX.service}/Abort": f"{PACKAGE}.AbortRequest",
    f"{HEALTH}/Check": "grpc.health.v1.HealthCheckRequest",
    f"{HEALTH}/Watch": "grpc.health.v1.HealthCheckRequest",
}
BAD = {
    "garbage": b"\xff" * 100,
    "truncated": GOOD[:-1],
    # Field 1, which is a text in each of them.
    "bad UTF-8": b"\x0a\x02\xff\xfe",
}


@pytest.fixture
async def servicer() -> AsyncIterator[CoreServicer]:
    engine = FakeEngine()
    board = StatusBoard()
    await engine.start()
    yield servicer_for(MLX, engine, board)
    await engine.close()


@pytest.fixture
async def channel(servicer: CoreServicer) -> AsyncIterator[grpc.aio.Channel]:
    server = GrpcServer(ServerOptions(), servicer.board)
    server.add(lambda grpc_server: MLX.registrar()(servicer, grpc_server), MLX.service)
    address = await server.bind()
    servicer.board.serving()
    try:
        async with grpc.aio.insecure_channel(str(address)) as channel:
            yield channel
    finally:
        await server.stop(0)


async def ending(channel: grpc.aio.Channel, method: str, data: bytes) -> tuple[object, str | None]:
    """How a call with these bytes ends. A stream's end is the end of a single answer, too."""
    rpc: grpc.aio.UnaryStreamMultiCallable[bytes, bytes] = channel.unary_stream(f"/{method}")
    call = rpc(data, timeout=10)
    try:
        async for _ in call:
            pass
    except grpc.aio.AioRpcError:
        pass
    return await call.code(), await call.details()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("kind", BAD)
async def test_bytes_that_are_no_message_are_the_callers_fault(
    channel: grpc.aio.Channel, servicer: CoreServicer, method: str, kind: str
) -> None:
    """C1: INVALID_ARGUMENT naming the message, not UNKNOWN; nothing is begun, all goes on."""
    expected = (
        grpc.StatusCode.INVALID_ARGUMENT,
        f"request: not a valid {METHODS[method]}",
    )
    assert await ending(channel, method, BAD[kind]) == expected
    assert not any(servicer.statistics().values())
    assert await ending(channel, f"{MLX.service}/Generate", GOOD) == (grpc.StatusCode.OK, "")
    assert await check(channel) == SERVING


async def test_unknown_fields_and_unknown_methods_are_as_ever(channel: grpc.aio.Channel) -> None:
    """A newer client's field is no fault, and a method of its is UNIMPLEMENTED."""
    generate = f"{MLX.service}/Generate"
    assert (await ending(channel, generate, GOOD + b"\xfa\x3f\x03abc"))[0] is grpc.StatusCode.OK
    code, _ = await ending(channel, f"{MLX.service}/Nope", b"\xff")
    assert code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("name", ["\U0001f600" * 700, "\u4e2d" * 4000, "n" * 20_000, "\n" * 3000])
async def test_a_refusal_gets_through_whatever_it_quotes(
    channel: grpc.aio.Channel, name: str
) -> None:
    """Q5: a status whose details are too long for the header would read RESOURCE_EXHAUSTED."""
    with pytest.raises(grpc.aio.AioRpcError, match="service: got") as refused:
        await check(channel, name)
    assert refused.value.code() is grpc.StatusCode.NOT_FOUND


async def test_a_health_name_that_is_a_credential_is_not_echoed(channel: grpc.aio.Channel) -> None:
    """Q4: what a client sends by mistake does not come back in an error, nor into its log."""
    key = "sk-abcdefghijklmnop1234567890ABCDEF"
    with pytest.raises(grpc.aio.AioRpcError, match="allowed: ''") as refused:
        await check(channel, key)
    assert key not in (refused.value.details() or "")


async def _answer(request: bytes, context: object) -> bytes:
    return request


def _plain(request: bytes, context: object) -> bytes:
    return request


def _handlers() -> dict[str, grpc.RpcMethodHandler[bytes, bytes]]:
    parse = MLX.pb.GenerateRequest.FromString
    return {
        "message": grpc.unary_unary_rpc_method_handler(_answer, parse),
        "bytes": grpc.unary_unary_rpc_method_handler(_answer),
        "thread": grpc.unary_unary_rpc_method_handler(_plain, parse),
        "stream": grpc.stream_unary_rpc_method_handler(_answer, parse),
    }


class Called:
    """gRPC's question about one call."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.invocation_metadata = ()


class Given(grpc.GenericRpcHandler):
    def __init__(self) -> None:
        self.handlers = _handlers()

    def service(self, handler_call_details: Any) -> grpc.RpcMethodHandler[bytes, bytes] | None:
        return self.handlers.get(handler_call_details.method)


def test_a_handler_is_made_once() -> None:
    """A call pays for a look into a dict; names that no service has are not collected."""
    given = Given()
    ours = Handlers(given)

    first = ours.service(Called("message"))
    assert first is not given.handlers["message"]
    assert ours.service(Called("message")) is first
    for name in ("bytes", "thread", "stream"):
        assert ours.service(Called(name)) is given.handlers[name]
    for number in range(5):
        assert ours.service(Called(f"unknown {number}")) is None
    assert set(ours._made) == set(given.handlers)
    given.handlers["message"] = _handlers()["message"]
    assert ours.service(Called("message")) is not first
