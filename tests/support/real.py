"""A real engine under its own launcher, whichever it is: run, waited for, looked into, ended.

Times are seconds.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress

from tests.support.processes import descendants, titles
from tests.support.servers import CACHE, Process, Server

NAME = "tiny"
"""Under which the tests' models are served."""
START_SECONDS = 180.0
"""Three interpreters import an engine one after another; on a busy machine that has taken 119 s."""

ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    # An engine is several interpreters; compiling what they import takes each half a minute.
    "PYTHONDONTWRITEBYTECODE": "",
    "PYTHONPYCACHEPREFIX": str(CACHE / "bytecode"),
    "OMP_NUM_THREADS": "1",
}


async def run_module(env: Mapping[str, str], *command: str, seconds: float) -> None:
    """`python -m` of something, to its end."""
    process = Process([sys.executable, "-m", *command], env)
    try:
        assert await process.exit_code(seconds) == 0, process.log
    finally:
        await asyncio.to_thread(process.end)


@asynccontextmanager
async def started(command: Sequence[str], env: Mapping[str, str]) -> AsyncIterator[Server]:
    """Not waited for, and gone after the block."""
    server = Server(command, env)
    try:
        yield server
    finally:
        await end(server)


@asynccontextmanager
async def up(server: Server, service: str) -> AsyncIterator[None]:
    """SERVING in the block, and stopped after it as an operator would."""
    await server.ready(service, START_SECONDS)
    yield
    if server.running:
        assert await server.stop(60) == 0, server.log


async def end(server: Process) -> None:
    """It and all its processes, whatever they are doing."""
    family = descendants(server.pid)
    await asyncio.to_thread(server.end)
    for pid in family:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def titled(server: Process, words: bytes) -> int:
    """The first process below `server` that calls itself so."""
    for pid, title in titles(server.pid).items():
        if words in title:
            return pid
    raise AssertionError(f"no {words!r} under {server.pid}:\n{server.log}")
