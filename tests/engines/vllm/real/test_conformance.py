"""The black-box suite against the real engine, from its first check to SIGTERM and exit."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.support.real_vllm import NAME, environment, serving
from tests.support.servers import Process


async def test_everything_holds_until_the_exit(model: Path, home: Path, tmp_path: Path) -> None:
    """B1: the shutdown checks are among it: SIGTERM lets a stream end well, and the code is 0.

    With vLLM's own defaults, as people start it.
    """
    flags = ("--served-model-name", NAME, "--max-model-len", "1024", "--enforce-eager")
    report = tmp_path / "report.json"
    async with serving(home, model, *flags) as server:
        suite = Process(
            [
                sys.executable, "-m", "smg_grpc_servicer.conformance", server.address,
                "--engine", "vllm", "--shutdown-pid", str(server.pid), "--json", str(report),
            ],
            environment(home),
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
