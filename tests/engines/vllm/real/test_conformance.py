"""The black-box suite against the real engine, from its first check to SIGTERM and exit."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

from tests.support.real_vllm import environment
from tests.support.servers import Process, Server


async def test_everything_holds_until_the_exit(
    restarted: Server, home: Path, tmp_path: Path
) -> None:
    """B1: the shutdown checks are among it: SIGTERM lets a stream end well, and the code is 0.

    With vLLM's own defaults, as people start it, and a gateway that stays connected.
    """
    report = tmp_path / "report.json"
    suite = Process(
        [
            sys.executable, "-m", "smg_grpc_servicer.conformance", restarted.address,
            "--engine", "vllm", "--shutdown-pid", str(restarted.pid), "--json", str(report),
        ],
        environment(home),
    )  # fmt: skip
    try:
        assert await suite.exit_code(240) == 0, f"{suite.log}\n{restarted.log}"
    finally:
        await asyncio.to_thread(suite.end)
    assert await restarted.exit_code(60) == 0, restarted.log
    found = json.loads(report.read_text())
    assert found["failed"] == 0
    assert found["passed"] > 60
    ends = [check for check in found["checks"] if check["name"].startswith("shutdown-")]
    assert {check["outcome"] for check in ends} == {"passed"}, ends
