"""What of SGLang's record decides over its warm-up, and what its ranks go on telling after it."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.types import ModelFacts
from smg_grpc_servicer.sglang.warm_up import Leftover, plan_of, planned
from smg_grpc_servicer.testing import FakeEngine
from smg_grpc_servicer.warmup.plan import NOTHING
from smg_grpc_servicer.warmup.setting import WarmUpBudget
from tests.support.sglang_config import sglang_config, stub_modules

FACTS = ModelFacts("/m", "m", max_context_length=4096, max_prompt_tokens=4000, vocab_size=32000)


@pytest.fixture(autouse=True)
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    ranks = {"num_dp_ranks_of": lambda config: config.dp_size * config.attn_dp_size}
    stub_modules(monkeypatch, runtime_context=ranks)


def config(*, graphs: str = "full", **given: Any) -> Any:
    phase = SimpleNamespace(backend=graphs, bs=[1, 2, 12] if graphs == "full" else None)
    values = {
        "device": "cuda",
        "disaggregation_mode": "null",
        "chunked_prefill_size": 2048,
        "max_prefill_tokens": 16384,
        "cuda_graph_config": SimpleNamespace(decode=phase, prefill=phase),
    }
    return sglang_config(**(values | given))


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        ({"device": "cpu"}, "on a CPU there is no more to make"),
        ({"graphs": "disabled"}, "without graphs there is no more to make"),
    ],
)
def test_ranks_that_make_nothing_had_their_one_request(given: dict[str, Any], reason: str) -> None:
    plan = plan_of(config(**given), FACTS, "auto")
    assert (plan.steps, plan.about) == (0, f"one request, {reason}")
    assert plan_of(config(**given), FACTS, "fast").steps > 10


def test_ranks_with_graphs_get_all_of_it() -> None:
    plan = plan_of(config(max_running_requests=16), FACTS, "auto")
    assert (plan.about, plan.opening) == ("full", ())
    sizes = {shot.prompt_tokens for step in (*plan.grid, *plan.rest) for shot in step.shots}
    assert max(sizes) == 2048
    assert 12 in sizes
    assert len(plan.grid[0].shots) == 16
    assert plan_of(config(), FACTS, "off") == NOTHING


@pytest.mark.parametrize(("chunk", "longest"), [(-1, 3993), (None, 3993), (8192, 3993), (64, 64)])
def test_no_prompt_is_longer_than_a_step(chunk: int | None, longest: int) -> None:
    """-1 is no chunking; the scheduler keeps a few positions of the longest request free."""
    plan = plan_of(config(chunked_prefill_size=chunk), FACTS, "fast")
    assert max(shot.prompt_tokens for step in plan.grid for shot in step.shots) == longest


def test_every_rank_is_warmed() -> None:
    plan = plan_of(config(dp_size=2), FACTS, "fast")
    assert {shot.rank for shot in plan.grid[0].shots} == {0, 1}


@pytest.mark.parametrize("role", ["prefill", "decode"])
def test_half_of_a_pair_is_not_warmed(role: str) -> None:
    plan = plan_of(config(disaggregation_mode=role), FACTS, "full")
    assert plan.steps == 0
    assert role in plan.about


def test_a_model_for_embeddings_is_not_warmed() -> None:
    assert plan_of(config(), replace(FACTS, is_generation=False), "full") == NOTHING


async def test_a_record_that_is_not_as_it_was_costs_the_warm_up_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """A newer SGLang whose configuration has moved still serves."""
    engine = FakeEngine()
    changed = config()
    del changed.cuda_graph_config
    await planned(engine, changed, WarmUpBudget("auto", 60))
    assert engine.submitted == []
    assert "warm-up: given up, serving without it" in caplog.text


def test_rates_of_a_warm_up_are_hidden_until_they_are_somebody_elses() -> None:
    """A scheduler tells the rates of its last work for as long as it has no other."""
    left = Leftover()

    def told(throughput: float | None, hits: float | None) -> tuple[Any, Any]:
        (load,) = left.hide([Load(0, gen_throughput=throughput, cache_hit_rate=hits)])
        return load.gen_throughput, load.cache_hit_rate

    assert told(None, None) == (None, None)
    assert told(811.0, 0.25) == (0.0, 0.0)
    assert told(812.0, 0.25) == (0.0, 0.0), "its last report came late"
    left.somebody_came()
    assert told(812.0, 0.5) == (0.0, 0.5)
    assert told(37.0, 0.5) == (37.0, 0.5)
    (other,) = left.hide([Load(1, gen_throughput=5.0)])
    assert other.gen_throughput == 5.0
