"""A real `sglang.launch_server --smg-grpc-mode` on the CPU: prepared, started, looked into, ended.

Times are seconds. `sglang_cpu` on PYTHONPATH makes up for the packages that have no CPU build.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from time import monotonic

from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.testing.dialects import DIALECTS
from tests.support import real
from tests.support.processes import titles
from tests.support.servers import ROOT, Server

SGLANG = DIALECTS["sglang"]
NAME = real.NAME
ADMIN_KEY = "an-admin-key-of-this-test"
PAGE = 4
START_SECONDS = real.START_SECONDS
TOKENS = 8192
"""What the KV cache holds."""

CPU = (
    "--device", "cpu", "--attention-backend", "torch_native", "--dtype", "float32",
    "--mem-fraction-static", "0.1", "--max-total-tokens", str(TOKENS),
    "--page-size", str(PAGE),
)  # fmt: skip
ENGINE = (
    *CPU, "--grammar-backend", "xgrammar", "--max-running-requests", "32",
    # Noise would fill its answers with white space, which JSON allows without end.
    "--constrained-json-disable-any-whitespace",
    "--return-hidden-states-mode", "full", "--enable-custom-logit-processor",
    "--enable-lora", "--lora-backend", "torch_native", "--max-lora-rank", "8",
    "--lora-target-modules", "q_proj", "v_proj", "--max-loras-per-batch", "2",
    "--max-loaded-loras", "2", "--admin-api-key", ADMIN_KEY,
)  # fmt: skip
"""Flags of the text engine that most tests share."""


def environment() -> dict[str, str]:
    """What a process with a CPU SGLang in it needs."""
    path = (ROOT / "tests" / "support" / "sglang_cpu", ROOT, ROOT / "src")
    return {
        "PYTHONPATH": os.pathsep.join(map(str, path)),
        **real.ENVIRONMENT,
        "SGLANG_USE_CPU_ENGINE": "1",
        # Each rank of several is bound to processors of its own.
        "SGLANG_CPU_OMP_THREADS_BIND": "0|0",
        # Compiling what penalties need takes longer than all that is asked here.
        "TORCHDYNAMO_DISABLE": "1",
        "CUDA_VISIBLE_DEVICES": "",
    }


async def run_module(
    *command: str, seconds: float = START_SECONDS, env: dict[str, str] | None = None
) -> None:
    """`python -m` of something that needs SGLang, to its end."""
    await real.run_module(environment() | (env or {}), *command, seconds=seconds)


@asynccontextmanager
async def started(
    model: Path, *flags: str, env: dict[str, str] | None = None, port: int | None = None
) -> AsyncIterator[Server]:
    """SGLang's launcher, as people type it; not waited for, and gone after the block."""
    # SGLang derives other ports from its own, some of them 10,000 higher.
    free, sidecar = (auto.free_ports(1) for _ in range(2))
    launch = [
        sys.executable, "-m", "sglang.launch_server", "--model-path", str(model),
        "--smg-grpc-mode", "--host", "127.0.0.1", "--port", str(port or free),
        "--smg-http-sidecar-port", str(sidecar), *flags,
    ]  # fmt: skip
    async with real.started(launch, environment() | (env or {})) as server:
        server.sidecar = sidecar  # type: ignore[attr-defined]
        yield server


@asynccontextmanager
async def serving(
    model: Path, *flags: str, env: dict[str, str] | None = None
) -> AsyncIterator[Server]:
    """The same, SERVING; it is stopped as an operator would."""
    async with started(model, *flags, env=env) as server, real.up(server, SGLANG.service):
        yield server


def scheduler(server: Server) -> int:
    """The process in which SGLang schedules; the first of several."""
    return real.titled(server, b"sglang::scheduler")


async def spawned(server: Server, seconds: float = 30.0) -> int:
    """The first rank as soon as its process is there, long before it has its name."""
    end = monotonic() + seconds
    while monotonic() < end:
        found = await asyncio.to_thread(_spawned, server.pid)
        if found:
            return found[0]
    raise AssertionError(f"no rank is started:\n{server.log}")


def _spawned(pid: int) -> list[int]:
    return [each for each, title in titles(pid).items() if b"--multiprocessing-fork" in title]
