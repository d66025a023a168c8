"""Cancel at every await: the engine is told exactly once, and every table is empty again."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.conformance.relay import Relay, relay
from smg_grpc_servicer.core import failpoints
from smg_grpc_servicer.core.errors import Unavailable
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.fake_engine import FakeEngine, Faults
from smg_grpc_servicer.testing.history import History
from tests.support.serving import SERVERS, Served, served
from tests.support.wait import until

DIALECT = DIALECTS["mlx"]
NOTHING = {"in_flight": 0, "pending": 0, "open_choices": 0, "owed": 0}
CHUNK_POINTS = ("before_write", "after_write")
UNFINISHED_AT_ENGINE = ("after_submit", *CHUNK_POINTS)

Leave = Callable[[Served, Any, Relay], None]


def client_cancel(server: Served, call: Any, between: Relay) -> None:
    call.cancel()


def connection_cut(server: Served, call: Any, between: Relay) -> None:
    between.cut()


def abort_rpc(server: Served, call: Any, between: Relay) -> None:
    server.servicer.abort(["swept"])


@pytest.mark.parametrize("leave", [client_cancel, connection_cut, abort_rpc])
@pytest.mark.parametrize(
    ("server", "point", "stream"),
    [
        (server, point, stream)
        for server in SERVERS
        for point in failpoints.NAMES
        for stream in (True, False)
        if stream or point not in CHUNK_POINTS
        # On ours the last message is gRPC's to send, with the status.
        if server == "stock" or point != "after_complete"
    ],
)
async def test_leaving_at_a_point_tells_the_engine_once(
    server: str, point: str, stream: bool, leave: Leave
) -> None:
    """T5, V1, P3: one abort when the engine has the request unfinished, none otherwise."""
    unfinished = point in UNFINISHED_AT_ENGINE
    engine = FakeEngine(step_seconds=0.001)
    reached, hold = asyncio.Event(), asyncio.Event()

    async def stay() -> None:
        reached.set()
        await hold.wait()

    async with (
        served(DIALECT, engine, make=SERVERS[server]) as running,
        relay(running.address) as between,
        grpc.aio.insecure_channel(between.address) as channel,
    ):
        with failpoints.arm(point, stay):
            tokens = 4000 if unfinished else 4
            request = DIALECT.generate("swept", [5], stream=stream, max_tokens=tokens)
            call = DIALECT.stub(channel).Generate(request)
            reading = asyncio.ensure_future(History(stream=stream).record(call))
            await asyncio.wait_for(reached.wait(), 5)
            leave(running, call, between)
            if leave is abort_rpc:
                hold.set()
            await until(lambda: running.servicer.table.in_flight == 0)
            await asyncio.gather(reading, return_exceptions=True)

        assert engine.aborts == (["swept"] if unfinished else [])
        assert running.servicer.statistics() == NOTHING
        assert engine.statistics() == {"running": 0}
        if point in ("admitted", "before_submit"):
            assert engine.submitted == []


async def test_cancel_while_the_engine_is_accepting() -> None:
    """T4: the abort follows a submit that was cut off, because the engine may have begun."""
    engine = FakeEngine(faults=Faults(submit_delay=30.0))
    async with served(DIALECT, engine) as server:
        call = server.stub.Generate(DIALECT.generate("early", [5]))
        reading = asyncio.ensure_future(History().record(call))
        await until(lambda: server.servicer.table.in_flight == 1)
        call.cancel()
        await until(lambda: server.servicer.table.in_flight == 0)
        await asyncio.gather(reading, return_exceptions=True)

        assert engine.aborts == ["early"]


ENDLESS = 1_000_000
"""Output tokens: no stream comes to its end before it is cancelled, however busy the machine is."""


@pytest.mark.parametrize("make", SERVERS.values(), ids=SERVERS)
@pytest.mark.parametrize("reads", [True, False])
async def test_sixty_cancels_of_busy_streams_are_sixty_aborts(
    reads: bool, make: Callable[..., grpc.aio.Server]
) -> None:
    """V1: a fast engine, so that the cancel often lands while a message is being written."""
    engine = FakeEngine(tokens_per_step=5)
    engine.facts = replace(engine.facts, max_context_length=2 * ENDLESS)
    async with served(DIALECT, engine, make=make) as server:

        async def one(index: int) -> None:
            call = server.stub.Generate(DIALECT.generate(f"r{index}", [5], max_tokens=ENDLESS))
            for _ in range(3):
                await call.read()
            if not reads:
                await until(lambda: f"r{index}" in engine._running)
            call.cancel()

        await asyncio.gather(*(one(index) for index in range(60)))
        seconds = await until(lambda: len(engine.aborts) == 60)

        assert sorted(engine.aborts) == sorted(f"r{index}" for index in range(60))
        assert seconds < 2
        await until(lambda: server.servicer.statistics() == NOTHING)
        assert engine.statistics() == {"running": 0}


async def test_an_abort_reaches_the_engine_within_100_ms() -> None:
    """C3, P3."""
    engine = FakeEngine(step_seconds=0.002)
    async with served(DIALECT, engine) as server:
        call = server.stub.Generate(DIALECT.generate("quick", [5], max_tokens=4000))
        await call.read()
        await call.read()
        call.cancel()

        assert await until(lambda: engine.aborts == ["quick"]) < 0.1


async def test_a_stopping_server_tells_the_engine_of_every_open_stream() -> None:
    engine = FakeEngine(step_seconds=0.002)
    async with served(DIALECT, engine) as server:
        running = [
            asyncio.ensure_future(server.generate(f"r{i}", max_tokens=4000)) for i in range(5)
        ]
        await until(lambda: engine.statistics()["running"] == 5)
        server.servicer.table.cut_all(Unavailable("the server is stopping"))
        histories = await asyncio.gather(*running)

        assert {h.code for h in histories} == {grpc.StatusCode.UNAVAILABLE}
        assert sorted(engine.aborts) == [f"r{i}" for i in range(5)]
