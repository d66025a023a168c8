"""Tests of the Rust path: a server child over the stub core, with one wheel or the other."""

from __future__ import annotations

import asyncio
import os
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import grpc

from smg_grpc_servicer.testing.dialects import DIALECTS
from tests.support.child import Child, running
from tests.support.client import Client
from tests.support.processes import engine_of, guard_of

NEWER = "SMG_NEWER_BINDING"
"""The Python of a venv that has the newer generation of the wheel."""
MODULE = "tests.support.rust_child"
VLLM = DIALECTS["vllm"]


@dataclass(frozen=True)
class Wheel:
    """An installed wheel, by the environment that leads to it."""

    name: str
    env: dict[str, str] = field(default_factory=dict)

    @property
    def counts(self) -> bool:
        """It tells requests in flight, holds readiness apart and sees a lost engine itself."""
        return self.name == "newer"


def wheel(name: str) -> Wheel:
    """`older`, the one of this venv, or `newer`."""
    return Wheel(name, {"PYTHONPATH": packages_of(NEWER)} if name == "newer" else {})


@cache
def packages_of(variable: str) -> str:
    """The folder of the packages in the venv whose Python a variable names."""
    assert variable in os.environ, f"{variable} is not set; `make test` does"
    code = "import sysconfig; print(sysconfig.get_path('platlib'))"
    done = subprocess.run(
        [os.environ[variable], "-c", code], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def files(folder: Path) -> list[str]:
    """What lies in a socket folder, if there is one."""
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@dataclass
class Served:
    """A server child that has bound its port."""

    child: Child
    address: str
    client: Client
    folder: Path

    @property
    def files(self) -> list[str]:
        """What lies in its socket folder."""
        return files(self.folder)

    async def saying(self, pattern: str, seconds: float = 20.0) -> str:
        """The first group of what it prints from here on, or the whole match."""
        found = await asyncio.to_thread(self.child.wait_for, pattern, seconds)
        return found[found.re.groups]

    @property
    def engine(self) -> int | None:
        """The engine's process, whoever is its parent by now; None when there is none."""
        return engine_of(self.child.process.pid)

    @property
    def guard(self) -> int | None:
        """The process that looks after the engine, its parent."""
        return guard_of(self.child.process.pid)

    async def exit_code(self, seconds: float = 20.0) -> int:
        return await asyncio.to_thread(self.child.exit_code, seconds)


@asynccontextmanager
async def served(
    wheel: Wheel, folder: Path, *flags: str, core: tuple[str, ...] = (), **knobs: str
) -> AsyncIterator[Served]:
    """A child; `core` are flags of the stub core, `knobs` variables without their prefix."""
    env = {f"SMG_VLLM_SERVICER_{name}": value for name, value in knobs.items()}
    env |= {"SMG_ZMQ_SOCKET_DIR": str(folder)} | wheel.env
    with running(*flags, "--", *core, module=MODULE, env=env) as child:
        address = await asyncio.to_thread(child.address)
        async with grpc.aio.insecure_channel(address) as channel:
            yield Served(child, address, Client(channel, VLLM), folder)
