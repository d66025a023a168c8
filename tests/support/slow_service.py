"""A service of plain bytes for tests of the server around it: it needs no engine and no proto."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc

from smg_grpc_servicer.core.errors import ServicerError
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.server import GrpcServer

NAME = "smg.test.Slow"
HOLD = f"/{NAME}/Hold"
ECHO = f"/{NAME}/Echo"

if TYPE_CHECKING:  # generic in their stubs only
    UnaryStream = grpc.aio.UnaryStreamMultiCallable[bytes, bytes]
    UnaryUnary = grpc.aio.UnaryUnaryMultiCallable[bytes, bytes]
    Context = grpc.aio.ServicerContext[bytes, bytes]


class SlowService:
    """`Echo` answers at once; `Hold` says `started`, is silent for N seconds, says `done`."""

    def __init__(self, board: StatusBoard) -> None:
        self.board = board
        self.in_flight = 0
        self.last_output: float | None = None
        self.busy_since: float | None = None
        self.cancelled = 0
        self._error: Exception | None = None
        self._holds: set[asyncio.Event] = set()
        board.progress = self

    def add_to(self, server: GrpcServer) -> None:
        server.add(self._register, NAME)

    def cut(self, error: Exception) -> None:
        self._error = error
        for event in self._holds:
            event.set()

    async def echo(self, request: bytes, context: Context) -> bytes:
        await self._admit(context)
        return request

    async def hold(self, request: bytes, context: Context) -> None:
        await self._admit(context)
        if not self.in_flight:
            self.busy_since = monotonic()
        self.in_flight += 1
        over = asyncio.Event()
        self._holds.add(over)
        self.board.request_arrived()
        try:
            await context.write(b"started")
            self.last_output = monotonic()
            asyncio.get_running_loop().call_later(float(request), over.set)
            await over.wait()
            if self._error is not None:
                await context.abort(grpc.StatusCode.UNAVAILABLE, str(self._error))
            await context.write(b"done")
            self.last_output = monotonic()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self._holds.discard(over)
            self.in_flight -= 1
            if not self.in_flight:
                self.busy_since = None
            self.board.request_left()

    async def _admit(self, context: Context) -> None:
        try:
            self.board.require_accepting()
        except ServicerError as error:
            await context.abort(grpc.StatusCode.UNAVAILABLE, str(error))

    def _register(self, server: grpc.aio.Server) -> None:
        handlers: dict[str, grpc.RpcMethodHandler[Any, Any]] = {
            "Echo": grpc.unary_unary_rpc_method_handler(self.echo),
            "Hold": grpc.unary_stream_rpc_method_handler(self.hold),
        }
        server_handlers = grpc.method_handlers_generic_handler(NAME, handlers)
        server.add_generic_rpc_handlers((server_handlers,))


def hold(channel: grpc.aio.Channel, seconds: float) -> grpc.aio.UnaryStreamCall[bytes, bytes]:
    """A stream that goes on for so long."""
    method: UnaryStream = channel.unary_stream(HOLD)
    return method(str(seconds).encode())


def echo(
    channel: grpc.aio.Channel, request: bytes = b"x", token: str | None = None
) -> grpc.aio.UnaryUnaryCall[bytes, bytes]:
    """A call that answers at once, with a bearer token if there is one."""
    method: UnaryUnary = channel.unary_unary(ECHO)
    metadata = None if token is None else (("authorization", f"Bearer {token}"),)
    return method(request, metadata=metadata, timeout=10)
