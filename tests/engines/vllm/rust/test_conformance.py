"""The black-box suite against the Rust path, to SIGTERM and exit; its differences are written down.

`differences.toml` has every check that fails and the reason. A check that fails and is not there,
or is there and passes, fails this test: then the list, the README or the code has to change. Those
under `varies` may do either.
"""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import tomllib

from tests.support.client import Client
from tests.support.real_vllm import environment
from tests.support.servers import Process, Server
from tests.support.vllm_cases import prompt

DIFFERENCES = Path(__file__).with_name("differences.toml")


async def test_it_differs_where_it_is_said_to_and_ends_with_0(
    client: Client, server: Server, home: Path, tmp_path: Path
) -> None:
    """SIGTERM is sent by the suite, while a stream runs: it is served to its end."""
    # The first logprobs make vLLM compile, which takes longer than a check may.
    await client.ids(prompt(4), logprobs=1, max_tokens=1)
    report = tmp_path / "report.json"
    suite = Process(
        [
            sys.executable, "-m", "smg_grpc_servicer.conformance", server.address, "--engine",
            "vllm", "--timeout", "40", "--shutdown-pid", str(server.pid), "--json", str(report),
        ],
        environment(home),
    )  # fmt: skip
    try:
        await suite.exit_code(300)
    finally:
        await asyncio.to_thread(suite.end)
    assert await server.exit_code(60) == 0, server.log
    found = json.loads(report.read_text())
    failed = {check["name"] for check in found["checks"] if check["outcome"] == "failed"}
    told = tomllib.loads(DIFFERENCES.read_text())
    assert failed - set(told["varies"]) == set(told["fails"]), suite.log
    assert found["passed"] > 60
