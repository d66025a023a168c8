"""A rank fails, is killed, or stops: who hears of it, how soon, and how the process ends."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from time import monotonic

import grpc
import pytest

from tests.support.client import Client, connected
from tests.support.dial import NOT_SERVING, SERVING, check, watch
from tests.support.processes import descendants
from tests.support.real_sglang import (
    CPU,
    NAME,
    SGLANG,
    START_SECONDS,
    scheduler,
    serving,
    spawned,
    started,
)
from tests.support.servers import Server
from tests.support.sglang_cases import prompt


async def everybody_hears(client: Client, how: str, act: object) -> None:
    """Streams end UNAVAILABLE in a second, health turns, and new requests are refused."""
    answers = watch(client.channel, SGLANG.service)
    assert (await answers.read()).status == SERVING
    running = [
        asyncio.ensure_future(client.generate(prompt(8, 70 + at), stream=at > 0, max_tokens=900))
        for at in range(4)
    ]
    await client.until_active(4)
    start = monotonic()
    assert callable(act)
    act()
    histories = await asyncio.wait_for(asyncio.gather(*running), 5)
    assert monotonic() - start < 1
    assert [h.code for h in histories] == [grpc.StatusCode.UNAVAILABLE] * 4
    assert all(how in h.details for h in histories)
    assert (await answers.read()).status == NOT_SERVING
    assert await check(client.channel) == NOT_SERVING  # not alive either
    health = await client.stub.HealthCheck(client.pb.HealthCheckRequest())
    assert not health.healthy
    late = await client.generate(prompt(3, 70), max_tokens=1)
    assert late.code is grpc.StatusCode.UNAVAILABLE


async def test_row_24_a_rank_that_reports_a_failure(client: Client, server: Server) -> None:
    """A rank with an exception sends SIGQUIT to its parent: no tree is killed, the code is 1."""
    await everybody_hears(client, "SIGQUIT", lambda: os.kill(server.pid, signal.SIGQUIT))
    assert await server.exit_code(30) == 1
    assert "SIGQUIT" in server.log.split("engine dead", 1)[1]


async def test_a_stopped_and_then_a_killed_rank(model: Path) -> None:
    """SIGSTOP: not ready while it owes answers, ready again after SIGCONT. SIGKILL: the end."""
    env = {"SMG_SERVICER_STALL_SECONDS": "2"}
    flags = ("--served-model-name", NAME, *CPU, "--grammar-backend", "none")
    async with serving(model, *flags, env=env) as server:
        async with connected(server.address, SGLANG) as client:
            rank = scheduler(server)
            answers = watch(client.channel, SGLANG.service)
            assert (await answers.read()).status == SERVING
            call, history = await client.begin(prompt(8, 75), max_tokens=300)
            os.kill(rank, signal.SIGSTOP)
            try:
                assert (await asyncio.wait_for(answers.read(), 20)).status == NOT_SERVING
                assert await check(client.channel) == SERVING  # a restart would not help
                health = await client.stub.HealthCheck(client.pb.HealthCheckRequest())
                assert not health.healthy
                assert "no output" in health.message
            finally:
                os.kill(rank, signal.SIGCONT)
            assert (await asyncio.wait_for(answers.read(), 20)).status == SERVING
            await history.record(call)
            assert history.complete().finish_reason == "length"
            await everybody_hears(client, "SIGKILL", lambda: os.kill(rank, signal.SIGKILL))
        assert await server.exit_code(30) == 1
        assert f"(pid {rank}) was ended by SIGKILL" in server.log


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
async def test_a_rank_that_dies_while_it_loads(model: Path, number: signal.Signals) -> None:
    """One line with the signal, exit code 1, and nothing is left."""
    async with started(model, *CPU, "--grammar-backend", "none") as server:
        await server.printed("server_args=", START_SECONDS)
        os.kill(await spawned(server), number)
        assert await server.exit_code(40) == 1, server.log
        assert "SGLang did not start: scheduler process 0 (pid" in server.log
        assert number.name in server.log
        assert not descendants(server.pid)
