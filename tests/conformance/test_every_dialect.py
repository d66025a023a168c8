"""The whole suite against our servicers over the FakeEngine, in each of the four protos."""

from __future__ import annotations

from pathlib import Path

import pytest

from smg_grpc_servicer.conformance import health, transport
from smg_grpc_servicer.conformance.registry import CHECKS
from smg_grpc_servicer.conformance.runner import Outcome, run
from smg_grpc_servicer.conformance.suite import select
from smg_grpc_servicer.testing.dialects import DIALECTS
from tests.conformance.servers import conforming, target_of, tokenizer_in

pytestmark = pytest.mark.timeout(150)  # more than a hundred checks, and some wait for nothing

NEED_OPTIONS = {
    "token-required",
    "shutdown-readiness",
    "shutdown-refuses",
    "shutdown-drains",
    "shutdown-exits",
}

UNSAYABLE = {
    "mlx": {
        "response-id",
        "choices-stream",
        "choices-unary",
        "stop-strings",
        "invalid-top-k-negative",
        "invalid-min-above-max",
        "invalid-rank-negative",
        "model-info-defaults",
        "loads",
    },
    "vllm": {"response-id", "invalid-top-k-negative"},
    "sglang": {"text-prompt", "seed-repeats", "seed-matters", "seed-in-company", "abort-list"},
    "tokenspeed": {"text-prompt", "abort-list"},
}
"""What each proto has no field for."""


@pytest.mark.parametrize("engine", sorted(DIALECTS))
async def test_our_servicer_keeps_every_promise(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if engine != "mlx":  # The server is the same: waiting for nothing to happen is enough once.
        monkeypatch.setattr(health, "OPEN_SECONDS", 0.1)
        monkeypatch.setattr(transport, "IDLE_SECONDS", 0.1)
    dialect, tokenizer = DIALECTS[engine], tokenizer_in(tmp_path / "model")
    async with conforming(dialect, tokenizer) as address, target_of(address) as target:
        assert target.dialect.engine == engine
        results = await run(target, select())

    failed = {r.check.name: r.detail for r in results if r.outcome is Outcome.FAIL}
    assert failed == {}
    assert len(results) == len(CHECKS)
    # A check that calls itself not applicable for a wrong reason would never fail.
    skipped = {r.check.name for r in results if r.outcome is Outcome.NOT_APPLICABLE}
    assert skipped == UNSAYABLE[engine] | NEED_OPTIONS


def test_there_are_enough_checks_and_each_states_its_promise() -> None:
    assert len(CHECKS) >= 40
    for name, each in CHECKS.items():
        assert each.promise, name
        assert "\n" not in each.promise
        assert len(each.promise) <= 95, name
