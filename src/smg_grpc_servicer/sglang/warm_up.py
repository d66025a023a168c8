"""What of SGLang is warmed up after its first request, and what that leaves in its loads.

SGLang captures its graphs by itself while it loads; what is left to a first use is kernels that are
tuned or compiled for a shape. On a CPU, and without graphs, there is next to none of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.types import ModelFacts
from smg_grpc_servicer.sglang.facts import num_ranks
from smg_grpc_servicer.warmup import inside
from smg_grpc_servicer.warmup.plan import NOTHING, Plan, Shape, make
from smg_grpc_servicer.warmup.setting import WarmUpBudget

log = logging.getLogger(__name__)

STEP_TOKENS = 16384
"""SGLang's own, where it is told neither a chunk nor a step."""
RESERVE = 6
"""Positions of a context that the scheduler keeps free."""


async def planned(engine: Engine, config: Any, budget: WarmUpBudget) -> None:
    """All that comes after the first request. Ranks that have answered it serve, whatever comes."""
    try:
        plan = plan_of(config, engine.model_facts(), budget.level)
        await inside.warm(engine, plan, budget.seconds)
    except Exception:
        log.exception("warm-up: given up, serving without it")


def plan_of(config: Any, facts: ModelFacts, level: str) -> Plan:
    """For ranks that have answered a request.

    :param config: SGLang's resolved record.
    """
    if not facts.is_generation:
        return NOTHING
    if config.disaggregation_mode != "null":
        return Plan(f"one request, a {config.disaggregation_mode} alone does half of each")
    pointless = None
    if config.device == "cpu":
        pointless = "on a CPU there is no more to make"
    elif all(phase.backend == "disabled" for phase in _phases(config)):
        pointless = "without graphs there is no more to make"
    chunk = config.chunked_prefill_size
    step = chunk if chunk is not None and chunk > 0 else config.max_prefill_tokens or STEP_TOKENS
    ranks = num_ranks(config)
    bounds = (facts.max_context_length, facts.max_prompt_tokens)
    return make(
        level,
        Shape(
            step_tokens=step,
            context=min((bound for bound in bounds if bound), default=None),
            vocab=facts.vocab_size,
            window=config.max_running_requests,
            captured=tuple(size for phase in _phases(config) for size in phase.bs or ()),
            ranks=tuple(range(ranks)) if ranks > 1 else (),
            reserve=RESERVE,
        ),
        pointless,
        opened=True,
    )


def _phases(config: Any) -> tuple[Any, Any]:
    graphs = config.cuda_graph_config
    return graphs.decode, graphs.prefill


class Leftover:
    """Hides what a warm-up left in the ranks' own rates until they have worked for somebody.

    A rank goes on publishing the rates of its last work, and the router would balance by them. In
    their place stands what a rank says that has not worked yet.
    """

    def __init__(self) -> None:
        self._left: dict[int, tuple[float | None, float | None]] = {}
        self._wanted = False

    def somebody_came(self) -> None:
        """From now on a rate that changes is theirs."""
        self._wanted = True

    def hide(self, loads: Sequence[Load]) -> list[Load]:
        return [self._without(load) for load in loads]

    def _without(self, load: Load) -> Load:
        now = (load.gen_throughput, load.cache_hit_rate)
        if not self._wanted:
            self._left[load.rank] = now
        throughput, hit_rate = (
            0.0 if rate is not None and rate == left else rate
            for rate, left in zip(now, self._left.get(load.rank, (None, None)), strict=True)
        )
        return replace(load, gen_throughput=throughput, cache_hit_rate=hit_rate)
