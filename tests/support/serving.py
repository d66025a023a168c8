"""A servicer over the FakeEngine on a real socket and a client for it, for one block."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from smg_grpc_servicer.core import wakeups
from smg_grpc_servicer.core.health import HealthServicer, StatusBoard
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.testing.dialects import Dialect
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from smg_grpc_servicer.testing.history import History
from smg_grpc_servicer.testing.servicers import servicer_for

Clock = Callable[[], float]

SERVERS: dict[str, Callable[..., grpc.aio.Server]] = {
    "ours": wakeups.server,
    "stock": grpc.aio.server,
}
"""Ours, and what an engine's own launcher has."""


@dataclass
class Served:
    """A running server and one client connection to it."""

    dialect: Dialect
    engine: FakeEngine
    board: StatusBoard
    servicer: CoreServicer
    channel: grpc.aio.Channel
    address: str

    @property
    def stub(self) -> Any:
        return self.dialect.stub(self.channel)

    async def generate(self, request_id: str = "req-1", **options: Any) -> History:
        """Send a request and read it to its end."""
        prompt = options.pop("prompt", [5, 6, 7])
        request = self.dialect.generate(request_id, prompt, **options)
        history = History(stream=request.stream)
        return await history.record(self.stub.Generate(request))

    async def abort(self, request_id: str) -> Any:
        return await self.stub.Abort(self.dialect.abort(request_id))


@asynccontextmanager
async def served(
    dialect: Dialect,
    engine: FakeEngine,
    *,
    ready: bool = True,
    stall_seconds: float = 30.0,
    clock: Clock = monotonic,
    make: Callable[..., grpc.aio.Server] = wakeups.server,
) -> AsyncIterator[Served]:
    """Start everything on a free port; at the end the tables must be empty."""
    board = StatusBoard(clock=clock)
    # A message for every step, also on a busy machine.
    servicer = servicer_for(dialect, engine, board, coalesce_seconds=0.0)
    server = make(options=[("grpc.so_reuseport", 0)])
    dialect.registrar()(servicer, server)
    health_pb2_grpc.add_HealthServicer_to_server(HealthServicer(board, [dialect.service]), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    if ready:
        await engine.start()
        board.serving()
    address = f"127.0.0.1:{port}"
    async with grpc.aio.insecure_channel(address) as channel:
        try:
            yield Served(dialect, engine, board, servicer, channel, address)
        finally:
            await server.stop(0)
            await engine.close()
            board.stopped()
