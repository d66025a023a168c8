"""The engine dies, hangs or takes its time: what clients, the log and the exit code say."""

from __future__ import annotations

import asyncio
import os
import re
import signal
from pathlib import Path
from time import monotonic

import grpc
import pytest

from tests.support.processes import engine_of, exists
from tests.support.rust_served import Served, Wheel, served, wheel

PROMPT = [5, 6, 7]
DEATHS = {
    "before HELLO": ("hello", "exit", "ended with exit code 7"),
    "between HELLO and READY": ("ready", "exit", "ended with exit code 7"),
    "after READY": ("registered", "exit", "ended with exit code 7"),
    "killed as it connects": ("registered", "kill", "was ended by SIGKILL"),
}

ENDED = re.compile("servicer shutting down|engine core reported fatal failure")


@pytest.mark.parametrize("death", DEATHS)
async def test_a_start_that_fails_is_told_at_once(binding: Wheel, folder: Path, death: str) -> None:
    """Exit code 1 and how the engine ended, long before any bound; sockets are removed."""
    point, how, words = DEATHS[death]
    async with served(binding, folder, core=("--die-at", point, "--how", how)) as server:
        assert await server.exit_code(10) == 1
        errors = [line for line in server.child.lines if " ERROR " in line]
        assert len(errors) == 1
        assert f"{words}; stopping" in errors[0]
        assert server.files == []


async def test_an_engine_that_ends_by_itself_is_a_failure(binding: Wheel, folder: Path) -> None:
    """Exit code 0 of an engine that nobody asked to end is no success."""
    core = ("--die-at", "registered", "--code", "0")
    async with served(binding, folder, core=core) as server:
        assert await server.exit_code(10) == 1
        assert "ended with exit code 0; stopping" in server.child.output


@pytest.mark.parametrize("busy", [False, True], ids=["idle", "streaming"])
async def test_a_killed_engine_ends_the_server(binding: Wheel, folder: Path, busy: bool) -> None:
    """smg 1.13.0 does not see it: streams hang until their deadline, health stays SERVING."""
    async with served(binding, folder, core=("--pace", "0.01")) as server:
        await server.saying("serving on grpc://")
        stream = asyncio.create_task(server.client.generate(PROMPT, max_tokens=4000))
        if not busy:
            stream.cancel()
        else:
            await answers(server)
        engine, guard = server.engine, server.guard
        assert engine is not None
        os.kill(engine, signal.SIGKILL)
        start = monotonic()
        if busy:
            history = await asyncio.wait_for(stream, 10)
            assert history.code is grpc.StatusCode.UNAVAILABLE, history.details
            # The server says so before its connections close.
            assert ENDED.match(history.details), history.details
        assert await server.exit_code(10) == 1
        assert monotonic() - start < 10
        assert f"the engine (pid {guard}) was ended by SIGKILL; stopping" in server.child.output
        assert server.files == []


async def test_an_engine_that_says_it_died(binding: Wheel, folder: Path) -> None:
    core = ("--pace", "0.01", "--die-at", "token", "--how", "sentinel")
    async with served(binding, folder, core=core) as server:
        await server.saying("serving on grpc://")
        history = await server.client.generate(PROMPT, max_tokens=4000)
        assert history.code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
        assert await server.exit_code(10) == 1


@pytest.mark.parametrize("point", ["hello", "ready"])
async def test_a_start_without_a_sign_of_life_is_given_up(
    binding: Wheel, folder: Path, point: str
) -> None:
    """A process that is merely there is no sign of life; published launchers take it for one."""
    core = ("--hang-at", point)
    async with served(binding, folder, core=core, STARTUP_TIMEOUT_SECS="1") as server:
        start = monotonic()
        assert await server.exit_code(10) == 1
        assert monotonic() - start < 10
        assert "without a sign of life" in server.child.output
        assert engine_of(server.child.process.pid) is None


async def test_a_start_at_work_may_take_longer(binding: Wheel, folder: Path) -> None:
    async with served(binding, folder, core=("--slow", "4"), STARTUP_TIMEOUT_SECS="2") as server:
        await server.saying("serving on grpc://")


async def test_a_start_at_work_has_a_ceiling(binding: Wheel, folder: Path) -> None:
    async with served(binding, folder, core=("--slow", "30"), STARTUP_CEILING_SECS="2") as server:
        assert await server.exit_code(10) == 1
        assert "reached its ceiling" in server.child.output


async def test_a_mute_engine_is_given_up(folder: Path) -> None:
    """Only newer wheels can tell; of an older one this bound cannot be asked (test_refusals.py)."""
    async with served(
        wheel("newer"),
        folder,
        core=("--mute",),
        SILENCE_TIMEOUT_SECS="1",
        PREFILL_TOKENS_PER_SEC="0",
    ) as server:
        await server.saying("serving on grpc://")
        history = await server.client.generate(PROMPT, max_tokens=5)
        assert history.code is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("end", ["crash", "stop"])
async def test_what_the_engine_started_ends_with_it(binding: Wheel, folder: Path, end: str) -> None:
    """Also in a session of its own and deaf to SIGTERM, and when its parent is gone already."""
    async with served(binding, folder, core=("--helper", "apart")) as server:
        helper = int(await server.saying(r"helper (\d+)"))
        await server.saying("serving on grpc://")
        await server.client.channel.close()
        engine = server.engine
        assert engine is not None
        if end == "crash":
            os.kill(engine, signal.SIGKILL)
        else:
            server.child.signal(signal.SIGTERM)
        assert await server.exit_code(10) == (1 if end == "crash" else 0)
        assert not exists(helper)
        assert not exists(engine)


async def answers(server: Served) -> None:
    """Until a request of its own was answered: those before it are with the engine."""
    assert await server.client.ids(PROMPT, max_tokens=1)
