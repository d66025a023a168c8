"""`grpc.health.v1` over a socket: what a probe and a watcher see of a server's life."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer
from tests.support.dial import NOT_SERVING, SERVING, UNKNOWN, check, names, watch
from tests.support.slow_service import NAME, SlowService, hold
from tests.support.wait import until


@asynccontextmanager
async def up(board: StatusBoard) -> AsyncIterator[tuple[GrpcServer, grpc.aio.Channel]]:
    server = GrpcServer(ServerOptions(), board)
    SlowService(board).add_to(server)
    address = await server.bind()
    try:
        async with grpc.aio.insecure_channel(str(address)) as channel:
            yield server, channel
    finally:
        await server.stop(0)


async def read(answers: Any) -> int:
    answer = await asyncio.wait_for(answers.read(), 5)
    return int(answer.status)


async def test_one_watch_sees_the_whole_life() -> None:
    """V2: a Watch stays open and hears of start, serving, engine death, each once."""
    board = StatusBoard()
    async with up(board) as (server, channel):
        ready, alive = watch(channel, NAME), watch(channel)
        assert (await read(ready), await read(alive)) == (NOT_SERVING, SERVING)
        board.warming()
        board.serving()
        assert await read(ready) == SERVING
        board.dead("it broke")
        assert (await read(ready), await read(alive)) == (NOT_SERVING, NOT_SERVING)
        board.draining()
        assert server.health.statistics() == {"watchers": 2}
        board.stopped()
        for answers in (ready, alive):
            with pytest.raises(grpc.aio.AioRpcError, match="the server has stopped") as ended:
                await answers.read()
            assert ended.value.code() is grpc.StatusCode.UNAVAILABLE
        await until(lambda: server.health.statistics() == {"watchers": 0})
        assert board.statistics() == {"subscribers": 0, "timers": 0}


async def test_draining_turns_readiness_only() -> None:
    """B1: while requests finish the process is alive, and not ready."""
    board = StatusBoard()
    async with up(board) as (_, channel):
        board.serving()
        assert (await check(channel, NAME), await check(channel)) == (SERVING, SERVING)
        board.draining()
        assert (await check(channel, NAME), await check(channel)) == (NOT_SERVING, SERVING)
        board.serving()
        assert await check(channel, NAME) == NOT_SERVING


async def test_an_unknown_name() -> None:
    """G1: Check answers NOT_FOUND; Watch says SERVICE_UNKNOWN, stays open, hears of it later."""
    board = StatusBoard()
    async with up(board) as (server, channel):
        with pytest.raises(grpc.aio.AioRpcError, match="service: got 'nobody'") as unknown:
            await check(channel, "nobody")
        assert unknown.value.code() is grpc.StatusCode.NOT_FOUND
        answers = watch(channel, "nobody")
        assert await read(answers) == UNKNOWN
        board.serving()
        server.health.add("nobody")
        assert await read(answers) == SERVING


@pytest.mark.skipif(not hasattr(health_pb2, "HealthListResponse"), reason="no List in this release")
async def test_list_names_everything() -> None:
    """The protocol's List gives each name and its status."""
    board = StatusBoard()
    async with up(board) as (_, channel):
        answer = await names(channel)
        assert {name: each.status for name, each in answer.statuses.items()} == {
            "": SERVING,
            NAME: NOT_SERVING,
        }


async def test_many_watchers_each_hear_each_change_once() -> None:
    """G1: fifty watchers, a thousand changes: nobody hears one twice, all end up right."""
    board = StatusBoard()
    board.serving()
    dice = random.Random(7)
    async with up(board) as (server, channel):
        heard: list[list[int]] = [[] for _ in range(50)]

        async def listen(log: list[int]) -> None:
            answers = watch(channel, "late")
            while True:
                log.append((await answers.read()).status)

        tasks = [asyncio.create_task(listen(log)) for log in heard]
        await until(lambda: all(log == [UNKNOWN] for log in heard))
        server.health.add("late")
        for turn in range(1000):
            board.progress = FakeProgress(stalled=dice.random() < 0.5)
            board.refresh()
            if turn % 50 == 0:
                await asyncio.sleep(0)
        board.progress = FakeProgress(stalled=True)
        board.refresh()
        await until(lambda: all(log[-1] == NOT_SERVING for log in heard))
        for log in heard:
            assert all(a != b for a, b in pairwise(log))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await until(lambda: server.health.statistics() == {"watchers": 0})
        assert board.statistics()["subscribers"] == 0


async def test_a_silent_engine_stops_being_ready_by_itself() -> None:
    """O1: requests in flight and no output: readiness goes within the bound, and comes back."""
    board = StatusBoard(stall_seconds=0.3)
    async with up(board) as (_, channel):
        board.serving()
        ready, alive = watch(channel, NAME), watch(channel)
        assert (await read(ready), await read(alive)) == (SERVING, SERVING)
        stream = hold(channel, 0.8)
        assert await stream.read() == b"started"
        assert await read(ready) == NOT_SERVING
        assert await check(channel) == SERVING
        assert await stream.read() == b"done"
        assert await stream.read() is grpc.aio.EOF
        assert await read(ready) == SERVING
        await until(lambda: board.statistics()["timers"] == 0)


class FakeProgress:
    """An engine that is either silent for ever or has nothing to do."""

    def __init__(self, *, stalled: bool) -> None:
        self.in_flight = int(stalled)
        self.last_output = None
        self.busy_since = float("-inf") if stalled else None
