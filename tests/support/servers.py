"""A server in a process of its own: started, waited for, read, stopped, and always ended.

`serving("--model", "demo")` is the MLX server on a free port; `python`, `module` and `env` make it
any other. Times are seconds. What it prints, stdout and stderr together, is read on a thread.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic
from typing import IO, Any

import grpc

from tests.support.dial import SERVING, watch

ROOT = Path(__file__).resolve().parents[2]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smg-grpc-servicer"
"""What outlives a run."""
MLX = "smg_grpc_servicer.mlx"
MLX_SERVICE = "mlx.grpc.engine.MlxEngine"
LISTENING = r"listening on grpcs?://(\S+?)[\"\s]"
START_SECONDS = 50.0


class Process:
    """A child process and its output."""

    def __init__(
        self, argv: Sequence[str], env: Mapping[str, str] | None = None, cwd: Path = ROOT
    ) -> None:
        environment = dict(os.environ, PYTHONUNBUFFERED="1", HF_HUB_OFFLINE="1")
        self._process = subprocess.Popen(
            argv,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment | dict(env or {}),
            cwd=cwd,
        )
        self._lines: list[str] = []
        self._news = threading.Condition()
        self._closed = False
        assert self._process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self._process.stdout,))
        self._reader.start()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def log(self) -> str:
        """All it has printed so far."""
        with self._news:
            return "".join(self._lines)

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    async def printed(self, pattern: str, seconds: float = 20.0) -> re.Match[str]:
        """The first match in all it prints, once it is there."""
        return await asyncio.to_thread(self._wait_for, pattern, seconds)

    def signal(self, number: signal.Signals) -> None:
        self._process.send_signal(number)

    async def exit_code(self, seconds: float = 30.0) -> int:
        """Its exit code when it ends; negative is the signal that killed it."""
        try:
            return await asyncio.to_thread(self._process.wait, seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running after {seconds} s:\n{self.log}") from None

    async def stop(self, seconds: float = 30.0) -> int:
        """SIGTERM, and its exit code."""
        self.signal(signal.SIGTERM)
        return await self.exit_code(seconds)

    def end(self) -> None:
        """Whatever it is doing, it is gone after this."""
        if self.running:
            self._process.kill()
        self._process.wait()
        # A grandchild may hold the pipe open: the reader is not waited for for ever.
        self._reader.join(5)
        if self._process.stdout is not None and not self._reader.is_alive():
            self._process.stdout.close()

    def memory(self) -> int:
        """Resident bytes now."""
        pages = int(Path(f"/proc/{self.pid}/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")

    def _wait_for(self, pattern: str, seconds: float) -> re.Match[str]:
        end = monotonic() + seconds
        with self._news:
            while True:
                if found := re.search(pattern, "".join(self._lines)):
                    return found
                left = end - monotonic()
                if left <= 0 or self._closed:
                    raise AssertionError(f"no {pattern!r} in:\n{''.join(self._lines)}")
                self._news.wait(left)

    def _read(self, pipe: IO[str]) -> None:
        for line in pipe:
            with self._news:
                self._lines.append(line)
                self._news.notify_all()
        with self._news:
            self._closed = True
            self._news.notify_all()


class Server(Process):
    """A servicer of ours; `address` is there after `bound`."""

    address = ""

    async def bound(self, seconds: float = START_SECONDS) -> str:
        """Where to dial it, as soon as it listens."""
        self.address = (await self.printed(LISTENING, seconds))[1]
        return self.address

    async def ready(self, service: str, seconds: float = START_SECONDS) -> None:
        """Wait until Watch says SERVING."""
        async with grpc.aio.insecure_channel(await self.bound(seconds)) as channel:
            call = watch(channel, service)
            try:
                await asyncio.wait_for(_until_serving(call), seconds)
            except (asyncio.TimeoutError, grpc.RpcError) as error:
                raise AssertionError(f"never SERVING ({error!r}):\n{self.log}") from error
            finally:
                call.cancel()


async def _until_serving(call: Any) -> None:
    while (await call.read()).status != SERVING:
        pass


@asynccontextmanager
async def started(
    *arguments: str,
    python: str = sys.executable,
    module: str = MLX,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
) -> AsyncIterator[Server]:
    """A server process, not waited for; it is gone at the end of the block."""
    path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH", ""))))
    server = Server([python, "-m", module, *arguments], {"PYTHONPATH": path} | dict(env or {}), cwd)
    try:
        yield server
    finally:
        await asyncio.to_thread(server.end)


@asynccontextmanager
async def serving(
    *arguments: str,
    python: str = sys.executable,
    module: str = MLX,
    env: Mapping[str, str] | None = None,
    cwd: Path = ROOT,
    service: str = MLX_SERVICE,
) -> AsyncIterator[Server]:
    """A server on a free port that is SERVING."""
    async with started(
        "--port", "0", *arguments, python=python, module=module, env=env, cwd=cwd
    ) as server:
        await server.ready(service)
        yield server
