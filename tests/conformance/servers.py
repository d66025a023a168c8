"""Servers for the suite to look at: conforming ones, and what mutants are made from."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from smg_grpc_servicer.conformance.connect import Connection
from smg_grpc_servicer.conformance.runner import prepare
from smg_grpc_servicer.conformance.target import Target
from smg_grpc_servicer.core.binding import channel_options
from smg_grpc_servicer.core.health import HealthServicer, StatusBoard
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.requests import RequestTable
from smg_grpc_servicer.core.server import GrpcServer
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.testing.dialects import Dialect
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from smg_grpc_servicer.testing.servicers import servicer_for

STEP_SECONDS = 0.001


def tokenizer_in(folder: Path) -> str:
    """A model directory with just enough for GetTokenizer."""
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    (folder / "config.json").write_text('{"model_type": "fake"}')
    return str(folder)


def slow_engine(tokenizer: str | None = None) -> FakeEngine:
    """Slow enough that an abort finds its stream running."""
    return FakeEngine(step_seconds=STEP_SECONDS, tokenizer=tokenizer)


@asynccontextmanager
async def conforming(dialect: Dialect, tokenizer: str | None = None) -> AsyncIterator[str]:
    """Our servicer as our own server serves it; the tables are empty at the end."""
    engine, board = slow_engine(tokenizer), StatusBoard()
    servicer = servicer_for(dialect, engine, board, coalesce_seconds=0.0)
    server = GrpcServer(ServerOptions(), board)
    server.add(lambda on: dialect.registrar()(servicer, on), dialect.service)
    address = await server.bind()
    await engine.start()
    board.serving()
    try:
        yield str(address)
        assert set(servicer.statistics().values()) == {0}
    finally:
        await server.stop(0)
        await engine.close()


@asynccontextmanager
async def target_of(address: str, **options: Any) -> AsyncIterator[Target]:
    target = await prepare(Connection(address), **options)
    try:
        yield target
    finally:
        await target.close()


@asynccontextmanager
async def spoiled(
    dialect: Dialect,
    servicer: Callable[[FakeEngine, StatusBoard], CoreServicer],
    *,
    health: Callable[[StatusBoard, list[str]], Any] = HealthServicer,
    tokenizer: str | None = None,
    options: list[tuple[str, Any]] | None = None,
    more: Callable[[grpc.aio.Server], None] = lambda server: None,
) -> AsyncIterator[str]:
    """A server put together by hand, so that each part of it can be a broken one."""
    engine, board = slow_engine(tokenizer), StatusBoard()
    if options is None:
        options = list(channel_options(2**29, 2**29))
    server = grpc.aio.server(options=options)
    spoilt = servicer(engine, board)
    # A message for every step: what a mutant spoils has to be there on a busy machine too.
    spoilt.table = board.progress = RequestTable(longest_hold=0.0)
    dialect.registrar()(spoilt, server)
    health_pb2_grpc.add_HealthServicer_to_server(health(board, [dialect.service]), server)
    more(server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await engine.start()
    board.serving()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        await server.stop(0)
        await engine.close()
        board.stopped()
