"""`smg serve --servicer-impl rust`: the router's own command starts the worker; its engine dies."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

from tests.support.processes import descendants, exists
from tests.support.real_vllm import ENGINE, NAME, engine_core, environment
from tests.support.router import Router, free_ports
from tests.support.wait import until

SECONDS = 240


async def test_it_serves_and_a_killed_engine_core_ends_the_worker_with_all_its_processes(
    model: Path, home: Path, tmp_path: Path
) -> None:
    """`smg serve` sets SMG_VLLM_SERVICER_IMPL after it has asked `require_upstream_hook`."""
    port, prometheus, worker = free_ports(3)
    router = Router(
        [
            sys.executable, "-m", "smg", "serve", "--backend", "vllm",
            "--connection-mode", "grpc", "--servicer-impl", "rust",
            "--model", str(model), "--served-model-name", NAME, *ENGINE,
            "--host", "127.0.0.1", "--port", str(port), "--worker-base-port", str(worker),
            "--router-prometheus-port", str(prometheus),
        ],
        {**environment(home), "NO_COLOR": "1"},
        tmp_path,
    )  # fmt: skip
    router.port = port
    family: list[int] = []
    try:
        await router.printed("serving on grpc://", SECONDS)
        await router.serves(NAME, 60)
        answer = await router.post(
            "/v1/chat/completions",
            model=NAME,
            messages=[{"role": "user", "content": "hello"}],
            max_tokens=5,
        )
        assert answer.status == 200
        family = descendants(router.pid)
        os.kill(engine_core(router), signal.SIGKILL)
        await router.printed(r"the engine \(pid \d+\) was ended by SIGKILL; stopping", 20)
        await until(lambda: not any(map(exists, family)), 30)
    finally:
        for pid in [*family, *descendants(router.pid)]:
            if exists(pid):
                os.kill(pid, signal.SIGKILL)
        await asyncio.to_thread(router.end)
