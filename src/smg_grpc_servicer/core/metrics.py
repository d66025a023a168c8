"""What is counted: requests, tokens, latencies, in the families `smg_servicer_*`.

Numbers are kept in plain Python on the event loop's thread and turned into Prometheus families
only when somebody scrapes, because a message must not pay for a lock and a label look-up. A
scrape on another thread sees a moment's numbers; a counter and its histogram may differ by the
request that is just being counted. Durations are seconds.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

TTFT_BOUNDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
GAP_BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.25, 0.5, 1.0, 2.5)
E2E_BOUNDS = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)


class Histogram:
    """Counts by upper bound; the last one is for everything above."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def add(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times

    def cumulative(self) -> list[tuple[str, int]]:
        """Pairs of upper bound and count up to it, as Prometheus wants them."""
        pairs = []
        running = 0
        for bound, count in zip((*map(str, self.bounds), "+Inf"), self.counts, strict=True):
            running += count
            pairs.append((bound, running))
        return pairs


class Metrics(ABC):
    """What the core reports, on the loop's thread. A call costs a microsecond or less."""

    details: Callable[[], Mapping[str, int]] = dict
    """The servicer's own figures, by name; those that only grow end in `_total`. On the loop."""

    @abstractmethod
    def request_started(self) -> None:
        """A request was admitted."""

    @abstractmethod
    def request_finished(
        self,
        reason: str,
        status: str,
        *,
        prompt: int = 0,
        cached: int = 0,
        generated: int = 0,
        ttft: float | None = None,
        e2e: float | None = None,
    ) -> None:
        """A request left: finish reason ("" for none), gRPC status name, tokens, latencies."""

    @abstractmethod
    def tokens(self, count: int, gap: float) -> None:
        """A message with `count` new tokens went out `gap` seconds after the one before it."""


class NullMetrics(Metrics):
    """Metrics that are off."""

    def request_started(self) -> None: ...

    def request_finished(
        self,
        reason: str,
        status: str,
        *,
        prompt: int = 0,
        cached: int = 0,
        generated: int = 0,
        ttft: float | None = None,
        e2e: float | None = None,
    ) -> None: ...

    def tokens(self, count: int, gap: float) -> None: ...


@dataclass
class RecordedMetrics(Metrics):
    """Metrics that are kept. `state` gives the board's `condition` when somebody scrapes."""

    engine: str
    model: str = ""
    state: Callable[[], str] = lambda: ""
    started: int = 0
    finished: dict[tuple[str, str], int] = field(default_factory=dict)
    """(finish reason, status) → requests."""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    ttft: Histogram = field(default_factory=lambda: Histogram(TTFT_BOUNDS))
    inter_token: Histogram = field(default_factory=lambda: Histogram(GAP_BOUNDS))
    e2e: Histogram = field(default_factory=lambda: Histogram(E2E_BOUNDS))
    done: int = 0
    others: Callable[[], Iterable[Any]] = tuple
    """The engine's own Prometheus families, beside ours; on the scrape's thread."""

    @property
    def in_flight(self) -> int:
        return self.started - self.done

    def request_started(self) -> None:
        self.started += 1

    def request_finished(
        self,
        reason: str,
        status: str,
        *,
        prompt: int = 0,
        cached: int = 0,
        generated: int = 0,
        ttft: float | None = None,
        e2e: float | None = None,
    ) -> None:
        self.done += 1
        key = (reason, status)
        self.finished[key] = self.finished.get(key, 0) + 1
        self.prompt_tokens += prompt
        self.cached_tokens += cached
        self.generated_tokens += generated
        if ttft is not None:
            self.ttft.add(ttft)
        if e2e is not None:
            self.e2e.add(e2e)

    def tokens(self, count: int, gap: float) -> None:
        # Tokens that were sent together share the gap before them.
        if count > 0:
            self.inter_token.add(gap / count, count)
