"""The engine's own statistics, heard where vLLM records them.

vLLM calls every stat logger after each step of each rank, so a listener among them needs none of
the private state of the others, works at any log level, and knows the engine's pulse also while
it prefills a long prompt. With `--disable-log-stats` there is none to be heard.
"""

from __future__ import annotations

import logging
import sys
from dataclasses import dataclass
from time import monotonic
from typing import Any

log = logging.getLogger(__name__)

_PROMETHEUS = "vllm.v1.metrics.prometheus"


def without_prometheus(async_llm: Any) -> None:
    """Take vLLM's own Prometheus logger out: with no endpoint nobody reads its figures, and they
    take a tenth of the launcher's time at 256 streams, by a profile.
    """
    loggers = getattr(getattr(async_llm, "logger_manager", None), "stat_loggers", None)
    if isinstance(loggers, list):
        loggers[:] = [each for each in loggers if type(each).__name__ != "PrometheusStatLogger"]


def families() -> list[Any]:
    """What vLLM counts for Prometheus, `vllm:*`; nothing while it loads."""
    # Not imported here: a scrape's thread would meet the one that is loading it.
    registry = getattr(sys.modules.get(_PROMETHEUS), "get_prometheus_registry", None)
    found = () if registry is None else registry().collect()
    return [family for family in found if family.name.startswith("vllm:")]


@dataclass(slots=True)
class RankStats:
    """What one rank last said."""

    running: int = 0
    waiting: int = 0
    kv_usage: float = 0.0
    """Share of KV blocks in use, 0 to 1."""


class StatsListener:
    """A stat logger of vLLM's interface (`AggregateStatLoggerBase`), by duck type."""

    def __init__(self) -> None:
        self.ranks: dict[int, RankStats] = {}
        """By the engine's index, which is the global rank."""
        self.last_step: float | None = None
        """`monotonic` seconds."""
        self._manager: Any = None

    def attach(self, async_llm: Any) -> bool:
        """Be among its loggers; cheap, and right again after elastic scaling made new ones."""
        manager = getattr(async_llm, "logger_manager", None)
        if manager is None:
            return False
        if manager is not self._manager:
            loggers = getattr(manager, "stat_loggers", None)
            if not isinstance(loggers, list):
                log.warning("vLLM's stat loggers are not where they were; loads are our own count")
                return False
            loggers.append(self)
            self._manager = manager
            self.ranks.clear()
        return True

    @property
    def attached(self) -> bool:
        return self._manager is not None

    def sign_of_life(self) -> float | None:
        """The last step; now when none is heard: then no work can be told from a hang."""
        return self.last_step if self.attached else monotonic()

    # vLLM's interface.

    def record(
        self,
        scheduler_stats: Any = None,
        iteration_stats: Any = None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
        **_later: Any,
    ) -> None:
        """Once per step and rank, on the event loop."""
        self.last_step = monotonic()
        if scheduler_stats is None:
            return
        rank = self.ranks.get(engine_idx)
        if rank is None:
            rank = self.ranks[engine_idx] = RankStats()
        rank.running = scheduler_stats.num_running_reqs
        # Requests that wait for a grammar or for remote KV stand in a queue of their own.
        rank.waiting = scheduler_stats.num_waiting_reqs + getattr(
            scheduler_stats, "num_skipped_waiting_reqs", 0
        )
        rank.kv_usage = scheduler_stats.kv_cache_usage

    def log(self) -> None:
        """Nothing is printed."""

    def log_engine_initialized(self) -> None:
        """Nothing is printed."""

    def record_sleep_state(self, *_args: Any, **_more: Any) -> None:
        """Not ours."""

    def record_admission_rejection(self, *_args: Any, **_more: Any) -> None:
        """Not ours."""
