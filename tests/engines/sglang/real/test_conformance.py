"""The black-box suite against the real engine, from its first check to SIGTERM and exit."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from tests.support.client import connected
from tests.support.real_sglang import CPU, NAME, SGLANG, environment, serving
from tests.support.servers import Process
from tests.support.sglang_cases import GREEDY


async def test_everything_holds_until_the_exit(
    models: dict[str, Path], offline: Any, tmp_path: Path
) -> None:
    """B1: the shutdown checks are among it: SIGTERM lets a stream end well, and the code is 0.

    A Qwen3, whose greedy ids are those of SGLang's own Engine.
    """
    report = tmp_path / "report.json"
    async with serving(models["qwen3"], "--served-model-name", NAME, *CPU) as server:
        async with connected(server.address, SGLANG) as client:
            requests = [client.request(c.prompt, **c.sampling) for c in GREEDY.values()]
            histories = await client.together(requests)
            told = [list(history.complete().output_ids) for history in histories]
            assert told == [offline["qwen3"][name]["ids"] for name in GREEDY]
        suite = Process(
            [
                sys.executable, "-m", "smg_grpc_servicer.conformance", server.address,
                "--engine", "sglang", "--shutdown-pid", str(server.pid), "--json", str(report),
            ],
            environment(),
        )  # fmt: skip
        try:
            assert await suite.exit_code(240) == 0, suite.log
        finally:
            await asyncio.to_thread(suite.end)
        assert await server.exit_code(60) == 0, server.log
    found = json.loads(report.read_text())
    assert found["failed"] == 0
    assert found["passed"] > 60
    ends = [check for check in found["checks"] if check["name"].startswith("shutdown-")]
    assert {check["outcome"] for check in ends} == {"passed"}, ends
