"""Whoever is killed, and whatever state the others are in: no process of an engine is left."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from signal import SIGKILL, SIGSTOP, SIGTERM

import pytest

from tests.support.processes import exists
from tests.support.rust_served import Served, served, wheel
from tests.support.wait import until

PROMPT = [5, 6, 7]
WORST = ("--stubborn", "--helper", "apart")
"""Deaf to SIGTERM, and so is its helper, which is in a session of its own."""


@asynccontextmanager
async def family(
    folder: Path, *core: str, grace: str = "0.5"
) -> AsyncIterator[tuple[Served, dict[str, int]]]:
    """A serving server, and the processes below it by what they are; nobody survives the block."""
    async with served(wheel("older"), folder, "--grace", grace, core=core) as server:
        helper = int(await server.saying(r"helper (\d+)"))
        await server.saying("serving on grpc://")
        assert server.engine is not None
        assert server.guard is not None
        found = {"guard": server.guard, "engine": server.engine, "helper": helper}
        try:
            yield server, found
        finally:
            for pid in filter(exists, found.values()):
                os.kill(pid, SIGKILL)


async def all_gone(found: dict[str, int]) -> None:
    await until(lambda: not any(map(exists, found.values())), 10)


@pytest.mark.parametrize("moment", ["", "at hello", "at registered", "serving on grpc://"])
async def test_a_killed_server_leaves_no_engine(folder: Path, moment: str) -> None:
    """The published launcher's engine goes on: nobody tells it that its parent is gone."""
    async with served(wheel("older"), folder) as server:
        if moment:
            await server.saying(moment)
            assert server.engine is not None
        # Otherwise the engine is just being started: it may not have asked yet to be told.
        server.child.signal(SIGKILL)
        await server.exit_code(10)
        await until(lambda: server.engine is None and server.guard is None, 10)


@pytest.mark.parametrize("stopped", ["", "engine", "helper", "guard", "engine helper guard"])
async def test_not_even_the_worst_one(folder: Path, stopped: str) -> None:
    """A stopped process does not run: it neither hears SIGTERM nor looks for its parent."""
    async with family(folder, *WORST) as (server, found):
        for name in stopped.split():
            os.kill(found[name], SIGSTOP)
        server.child.signal(SIGKILL)
        await all_gone(found)


async def test_a_stopped_engine_may_still_end_by_itself(folder: Path) -> None:
    """Long before its grace is over, which is for what it has to put away."""
    async with family(folder, "--helper", "apart", grace="60") as (server, found):
        os.kill(found["engine"], SIGSTOP)
        server.child.signal(SIGKILL)
        await all_gone(found)


async def test_a_stopped_engine_hears_of_a_stop(folder: Path) -> None:
    """It is continued, and ends in time; nothing is killed."""
    async with family(folder, "--helper", "apart") as (server, found):
        await server.client.channel.close()
        os.kill(found["engine"], SIGSTOP)
        server.child.signal(SIGTERM)
        assert await server.exit_code(10) == 0
        assert " within " not in server.child.output
        await all_gone(found)


async def test_a_killed_guard_takes_the_engine_along(folder: Path) -> None:
    async with family(folder, *WORST) as (server, found):
        os.kill(found["engine"], SIGSTOP)
        os.kill(found["guard"], SIGKILL)
        assert await server.exit_code(10) == 1
        pid = found["guard"]
        assert f"the engine (pid {pid}) was ended by SIGKILL; stopping" in server.child.output
        await all_gone(found)


async def test_a_killed_guard_and_a_killed_server(folder: Path) -> None:
    """As by a broad `pkill -9`: nobody is left to look, and the kernel ends the engine."""
    async with family(folder, *WORST) as (server, found):
        for name in ("engine", "guard"):
            os.kill(found[name], SIGSTOP)
        server.child.signal(SIGKILL)
        os.kill(found["guard"], SIGKILL)
        await until(lambda: not exists(found["engine"]), 10)


async def test_an_engine_and_a_server_that_are_killed_together(folder: Path) -> None:
    """The helper has lost both; the guard still knows it."""
    async with family(folder, *WORST) as (server, found):
        os.kill(found["engine"], SIGKILL)
        server.child.signal(SIGKILL)
        await all_gone(found)
