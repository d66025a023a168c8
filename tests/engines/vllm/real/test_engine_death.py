"""The engine core is killed: who hears of it, how soon, and how the process ends."""

from __future__ import annotations

import asyncio
import os
import signal
from time import monotonic

import grpc

from tests.support.client import Client
from tests.support.dial import NOT_SERVING, SERVING, check, watch
from tests.support.real_vllm import VLLM, engine_core
from tests.support.servers import Server
from tests.support.vllm_cases import prompt


async def test_a_killed_engine_core_is_noticed_at_once(client: Client, server: Server) -> None:
    """O1, V7: streams end UNAVAILABLE in a second, health turns, the exit code is 1 in time."""
    answers = watch(client.channel, VLLM.service)
    assert (await answers.read()).status == SERVING
    running = [
        asyncio.ensure_future(client.generate(prompt(8, 70 + at), stream=at > 0, max_tokens=1000))
        for at in range(4)
    ]
    await client.until_active(4)
    start = monotonic()
    os.kill(engine_core(server), signal.SIGKILL)
    histories = await asyncio.wait_for(asyncio.gather(*running), 5)
    assert monotonic() - start < 1
    assert [h.code for h in histories] == [grpc.StatusCode.UNAVAILABLE] * 4
    assert all("engine" in h.details for h in histories)
    assert (await answers.read()).status == NOT_SERVING
    assert await check(client.channel) == NOT_SERVING  # not alive either
    health = await client.stub.HealthCheck(client.pb.HealthCheckRequest())
    assert not health.healthy
    late = await client.generate(prompt(3, 70), max_tokens=1)
    assert late.code is grpc.StatusCode.UNAVAILABLE
    assert await server.exit_code(30) == 1
