"""What each data-parallel rank has to do: the engine's figures, and our own where it has none.

Every event costs O(1). A request belongs to the rank it was pinned or routed to; with one rank
that is plain, with several and no word from vLLM it is counted on none, and what hangs on the
count is unknown. Tokens per second are over the last seconds, as of the reports asked for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from time import monotonic

from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.vllm.stats import RankStats

WINDOW_SECONDS = 2.0
"""A rate looks back at least this far."""
SPACING_SECONDS = 0.25
HIT_RATE_REQUESTS = 64


class RankCounts:
    """One rank's requests as this process forwarded them."""

    __slots__ = (
        "_hits",
        "_marks",
        "cached",
        "generated",
        "in_flight",
        "prompted",
        "silent",
        "silent_tokens",
    )

    def __init__(self, now: float) -> None:
        self.in_flight = 0
        self.silent = 0
        """Requests without any output yet: they wait or are prefilled."""
        self.silent_tokens = 0
        self.generated = 0
        self.cached = 0
        self.prompted = 0
        self._hits: deque[tuple[int, int]] = deque()
        self._marks: deque[tuple[float, int]] = deque([(now, 0)])

    def answered(self, prompt: int, cached: int | None) -> None:
        if cached is None or not prompt:
            return
        self._hits.append((prompt, cached))
        self.prompted += prompt
        self.cached += cached
        if len(self._hits) > HIT_RATE_REQUESTS:
            oldest, hit = self._hits.popleft()
            self.prompted -= oldest
            self.cached -= hit

    @property
    def hit_rate(self) -> float | None:
        """Cached part of the last requests' prompts."""
        return min(self.cached / self.prompted, 1.0) if self.prompted else None

    def rate(self, now: float) -> float | None:
        """Tokens per second since a mark about `WINDOW_SECONDS` ago; None when none is old enough.

        Marks are left by the readers, so nobody looks at a clock for a token.
        """
        marks = self._marks
        while len(marks) > 1 and now - marks[1][0] >= WINDOW_SECONDS:
            marks.popleft()
        if now - marks[-1][0] >= SPACING_SECONDS:
            marks.append((now, self.generated))
        since, then = marks[0]
        return (self.generated - then) / (now - since) if now - since >= SPACING_SECONDS else None


class Tracked:
    """One request on the books; `left` is told once, by whoever ends it."""

    __slots__ = ("_counts", "_prompt", "_silent", "_table")

    def __init__(self, table: LoadTable, prompt: int, counts: RankCounts | None) -> None:
        self._table = table
        self._prompt = prompt
        self._counts = counts
        self._silent = True
        table.homeless += counts is None
        if counts is not None:
            counts.in_flight += 1
            counts.silent += 1
            counts.silent_tokens += prompt

    def generated(self, tokens: int) -> None:
        if self._counts is not None:
            self._counts.generated += tokens

    def answered(self, cached: int | None) -> None:
        """Its first output came."""
        if self._silent and self._counts is not None:
            self._speak(self._counts)
            self._counts.answered(self._prompt, cached)
        self._silent = False

    def settle(self, rank: int) -> None:
        """vLLM has chosen a rank for a request that was pinned to none."""
        counts = self._table.counts.get(rank)
        if self._counts is None and counts is not None:
            self._table.homeless -= 1
            self._counts = counts
            counts.in_flight += 1
            if self._silent:
                counts.silent += 1
                counts.silent_tokens += self._prompt

    def left(self) -> None:
        if self._counts is None:
            self._table.homeless -= 1
            return
        self._counts.in_flight -= 1
        if self._silent:
            self._speak(self._counts)
            self._silent = False

    def _speak(self, counts: RankCounts) -> None:
        counts.silent -= 1
        counts.silent_tokens -= self._prompt


class LoadTable:
    """All ranks this process drives."""

    def __init__(
        self,
        ranks: Sequence[int],
        *,
        max_running: int | None,
        max_tokens: int | None,
        clock: Callable[[], float] = monotonic,
    ) -> None:
        self.counts = {rank: RankCounts(clock()) for rank in ranks}
        self.homeless = 0
        """Requests whose rank nobody told."""
        self._max_running = max_running
        self._max_tokens = max_tokens
        self._clock = clock

    def start_over(self) -> None:
        """What was counted was nobody's. Requests in flight leave the books they stand in."""
        self.counts = {rank: RankCounts(self._clock()) for rank in self.counts}

    def submitted(self, prompt: int, rank: int | None) -> Tracked:
        """A request goes to the engine, pinned to a global rank or left to vLLM."""
        if rank is None and len(self.counts) == 1:
            rank = next(iter(self.counts))
        return Tracked(self, prompt, None if rank is None else self.counts.get(rank))

    def loads(self, stats: dict[int, RankStats]) -> list[Load]:
        """One row per rank; `stats` has the ranks whose engine reports."""
        now = self._clock()
        return [
            self._load(rank, counts, stats.get(rank), now) for rank, counts in self.counts.items()
        ]

    def _load(self, rank: int, counts: RankCounts, stats: RankStats | None, now: float) -> Load:
        running, waiting = self._split(counts) if stats is None else (stats.running, stats.waiting)
        usage = None if stats is None else max(stats.kv_usage, 0.0)
        known = usage is not None and self._max_tokens is not None
        return Load(
            rank=rank,
            running_requests=running,
            waiting_requests=waiting,
            waiting_uncached_tokens=self._waiting_tokens(counts, waiting),
            used_tokens=round(usage * self._max_tokens) if known else None,  # type: ignore[operator]
            max_total_tokens=self._max_tokens,
            max_running_requests=self._max_running,
            token_usage=usage,
            gen_throughput=None if self.homeless else counts.rate(now),
            cache_hit_rate=counts.hit_rate,
        )

    def _split(self, counts: RankCounts) -> tuple[int | None, int | None]:
        """Running and waiting without the engine's word: it runs as many as it may."""
        if self.homeless:
            return None, None
        if self._max_running is None:
            return counts.in_flight - counts.silent, counts.silent
        running = min(counts.in_flight, self._max_running)
        return running, counts.in_flight - running

    def _waiting_tokens(self, counts: RankCounts, waiting: int | None) -> int | None:
        """Prompt tokens the queue has still to compute: the mean silent prompt for each waiter."""
        if waiting is None or self.homeless:
            return None
        if not waiting or not counts.silent:
            return 0
        tokens = counts.silent_tokens * min(waiting, counts.silent) / counts.silent
        return round(tokens * (1.0 - (counts.hit_rate or 0.0)))

    @property
    def pending_tokens(self) -> int | None:
        """Prompt tokens of requests without output; None when not all of them are counted."""
        return None if self.homeless else sum(c.silent_tokens for c in self.counts.values())

    def statistics(self) -> dict[str, int]:
        counts = self.counts.values()
        return {
            "tracked": self.homeless + sum(c.in_flight for c in counts),
            "silent": sum(c.silent for c in counts),
            "silent_tokens": sum(c.silent_tokens for c in counts),
        }
