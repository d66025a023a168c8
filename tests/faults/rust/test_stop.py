"""SIGTERM: what may finish does, what is left is cut, and nothing stays behind."""

from __future__ import annotations

import asyncio
import os
import random
from pathlib import Path
from signal import SIGKILL, SIGTERM
from time import monotonic

import grpc
import pytest

from tests.support.child import Child, running
from tests.support.client import Client
from tests.support.processes import engine_of, exists
from tests.support.rust_served import MODULE, VLLM, Wheel, files, served
from tests.support.wait import until

PROMPT = [5, 6, 7]
PACED = ("--pace", "0.01")
LONG = 4000
"""Tokens of a request that takes 40 s when paced."""


async def test_a_request_may_finish(binding: Wheel, folder: Path) -> None:
    """And then the server does not wait for the rest of the drain."""
    async with served(binding, folder, core=PACED, DRAIN_SECS="30") as server:
        await server.saying("serving on grpc://")
        call, history = await server.client.begin(PROMPT, max_tokens=50)
        server.child.signal(SIGTERM)
        await history.record(call)
        assert history.code is grpc.StatusCode.OK
        assert len(history.complete().output_ids) == 50
        del call  # it holds the connection, all that an older wheel goes by
        await server.client.channel.close()
        assert await server.exit_code(10) == 0


async def test_a_drain_has_a_bound(binding: Wheel, folder: Path) -> None:
    async with served(binding, folder, core=PACED, DRAIN_SECS="1") as server:
        await server.saying("serving on grpc://")
        call, history = await server.client.begin(PROMPT, max_tokens=LONG)
        server.child.signal(SIGTERM)
        start = monotonic()
        await history.record(call)
        assert history.code is grpc.StatusCode.UNAVAILABLE
        assert await server.exit_code(10) == 0
        assert 1 <= monotonic() - start < 10
        # What is counted is named: a gateway's idle connection is no request.
        what = "requests" if binding.counts else "connections"
        assert f"{what} that are cut: 1" in server.child.output


async def test_a_client_that_stays_connected(binding: Wheel, folder: Path) -> None:
    """A gateway does: it holds nothing up but the drain of a wheel that counts no requests."""
    async with served(binding, folder, DRAIN_SECS="2") as server:
        await server.saying("serving on grpc://")
        assert len(await server.client.ids(PROMPT, max_tokens=3)) == 3
        server.child.signal(SIGTERM)
        assert await server.exit_code(10) == 0
        assert ("the drain is over" in server.child.output) is not binding.counts
        assert server.files == []


async def test_a_second_signal_does_not_wait(binding: Wheel, folder: Path) -> None:
    """Neither for requests nor for an engine that will not end; all is cleaned up the same."""
    core = (*PACED, "--stubborn")
    async with served(
        binding, folder, "--exit-seconds", "30", core=core, DRAIN_SECS="30"
    ) as server:
        await server.saying("serving on grpc://")
        engine = server.engine
        assert engine is not None
        call, history = await server.client.begin(PROMPT, max_tokens=LONG)
        server.child.signal(SIGTERM)
        await server.saying("SIGTERM: stopping")
        server.child.signal(SIGTERM)
        start = monotonic()
        await history.record(call)
        assert history.code is grpc.StatusCode.UNAVAILABLE
        assert await server.exit_code(10) == 0
        assert monotonic() - start < 10
        assert not exists(engine)
        assert server.files == []


async def test_an_engine_deaf_to_sigterm_is_killed(binding: Wheel, folder: Path) -> None:
    core = ("--stubborn",)
    async with served(binding, folder, "--exit-seconds", "1", core=core) as server:
        await server.saying("serving on grpc://")
        engine = server.engine
        assert engine is not None
        await server.client.channel.close()
        server.child.signal(SIGTERM)
        assert await server.exit_code(10) == 0
        assert "the engine did not end within 1 s of SIGTERM; killing it" in server.child.output
        assert not exists(engine)


async def test_an_engine_that_dies_in_the_drain_is_told(binding: Wheel, folder: Path) -> None:
    async with served(binding, folder, core=PACED, DRAIN_SECS="30") as server:
        await server.saying("serving on grpc://")
        call, history = await server.client.begin(PROMPT, max_tokens=LONG)
        engine = server.engine
        assert engine is not None
        server.child.signal(SIGTERM)
        await server.saying("SIGTERM: stopping")
        os.kill(engine, SIGKILL)
        await history.record(call)
        assert history.code is grpc.StatusCode.UNAVAILABLE
        assert await server.exit_code(10) == 1


async def test_a_start_can_be_stopped(binding: Wheel, folder: Path) -> None:
    async with served(binding, folder, core=("--hang-at", "hello")) as server:
        await server.saying("at hello")
        server.child.signal(SIGTERM)
        assert await server.exit_code(10) == 0
        assert server.files == []


@pytest.mark.parametrize("moment", ["listening on", "at hello", "serving on grpc://"])
async def test_a_storm_of_signals(binding: Wheel, folder: Path, moment: str) -> None:
    """As from somebody who leans on Ctrl-C: no engine stays, however deaf it is."""
    core = ("--stubborn",) if moment.startswith("serving") else ("--stubborn", "--hang-at", "hello")
    env = {"SMG_ZMQ_SOCKET_DIR": str(folder)} | binding.env
    with running("--", *core, module=MODULE, env=env) as child:
        await asyncio.to_thread(child.wait_for, moment)
        for _ in range(30):
            child.signal(SIGTERM)
            await asyncio.sleep(0.002)  # those that come together are one to the system
        assert await asyncio.to_thread(child.exit_code, 10) in (0, 128 + SIGTERM), child.output
        # Sooner than by the engine's own look at its parent.
        await until(lambda: engine_of(child.process.pid) is None, 5)


MOMENTS = 13
SHARDS = 4
STAGES = (
    "",
    "listening on",
    "at hello",
    "at ready",
    "at registered",
    "serving on grpc://",
    "streaming",
)


@pytest.mark.parametrize("shard", range(SHARDS))
async def test_any_moment_will_do(binding: Wheel, folder: Path, shard: int) -> None:
    """A hundred moments in all: before the server listens, while the engine starts, connects,
    serves. Exit code 0, in time, no engine, no socket.
    """
    moments = random.Random(f"{binding.name} {shard}")
    turn = asyncio.Semaphore(4)

    async def one(number: int) -> None:
        stage = STAGES[(shard * MOMENTS + number) % len(STAGES)]
        seconds = moments.uniform(0, 0.2 if stage else 0.5)
        async with turn:
            await one_moment(binding, folder.with_name(f"s{number}"), stage, seconds)

    await asyncio.gather(*map(one, range(MOMENTS)))


async def one_moment(binding: Wheel, folder: Path, stage: str, seconds: float) -> None:
    """SIGTERM that long after a stage was reached."""
    env = {"SMG_ZMQ_SOCKET_DIR": str(folder), "SMG_VLLM_SERVICER_DRAIN_SECS": "0.2"} | binding.env
    with running("--", *PACED, module=MODULE, env=env) as child:
        if stage == "streaming":
            async with grpc.aio.insecure_channel(await asyncio.to_thread(child.address)) as channel:
                await asyncio.to_thread(child.wait_for, "serving on")
                call, history = await Client(channel, VLLM).begin(PROMPT, max_tokens=LONG)
                await end(child, folder, (stage, seconds))
                await history.record(call)
                assert history.code is grpc.StatusCode.UNAVAILABLE
            return
        if stage:
            await asyncio.to_thread(child.wait_for, stage)
        await end(child, folder, (stage, seconds))


async def end(child: Child, folder: Path, moment: tuple[str, float]) -> None:
    await asyncio.sleep(moment[1])
    child.signal(SIGTERM)
    start = monotonic()
    code = await asyncio.to_thread(child.exit_code, 15)
    # Before our handler is there, the system's ends the process; nothing was begun then.
    begun = "listening on" in child.output
    assert code == 0 if begun else code in (0, -SIGTERM), (moment, child.output)
    # What takes a moment on a machine at rest; no bound of a step was reached.
    assert monotonic() - start < 10, (moment, child.output)
    assert " within " not in child.output, (moment, child.output)
    assert engine_of(child.process.pid) is None, (moment, child.output)
    assert files(folder) == [], moment
