"""The whole suite against our servicers over the FakeEngine, in each of the four protos."""

from __future__ import annotations

import pytest

from smg_grpc_servicer.conformance.registry import CHECKS
from smg_grpc_servicer.conformance.runner import Outcome, run
from smg_grpc_servicer.conformance.suite import select
from smg_grpc_servicer.testing.dialects import DIALECTS
from tests.conformance.servers import conforming, target_of


@pytest.mark.parametrize("engine", sorted(DIALECTS))
async def test_our_servicer_keeps_every_promise(engine: str) -> None:
    async with conforming(DIALECTS[engine]) as address, target_of(address) as target:
        assert target.dialect.engine == engine
        results = await run(target, select())

    failed = {r.check.name: r.detail for r in results if r.outcome is Outcome.FAIL}
    assert failed == {}
    assert len(results) == len(CHECKS)


def test_there_are_enough_checks_and_each_states_its_promise() -> None:
    assert len(CHECKS) >= 40
    for name, each in CHECKS.items():
        assert each.promise, name
        assert "\n" not in each.promise
        assert len(each.promise) <= 95, name
