"""Bringing prompts into caches: two lanes, so that short prompts never wait for a long one.

Short prompts are run together, right-padded; a long one is run alone, a chunk at a time, and a
running row waits for no more than one of each per step. All of a prompt but its last token is
processed here: the decode batch feeds that one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import islice

import mlx.core as mx

from smg_grpc_servicer.mlx.runtime import caches as kv
from smg_grpc_servicer.mlx.runtime.decode import Model
from smg_grpc_servicer.mlx.runtime.job import Row
from smg_grpc_servicer.mlx.runtime.prefix_cache import PrefixCache
from smg_grpc_servicer.mlx.runtime.steps import StepFailed

PAD_SLACK = 16
"""Prompts are padded to each other up to twice the shorter one's length plus this."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Prompt tokens per step: beside running rows, and when nothing is generating."""

    busy: int = 256
    idle: int = 512
    rows: int = 8
    """Most prompts in one group."""


@dataclass(slots=True)
class Prefilled:
    """What one turn brought: groups ready to generate with their caches, and failed rows."""

    ready: list[tuple[list[Row], kv.Caches]] = field(default_factory=list)
    failed: list[tuple[Row, Exception]] = field(default_factory=list)
    tokens: int = 0


class Prefill:
    def __init__(
        self,
        model: Model,
        make_caches: Callable[[], kv.Caches],
        prefix: PrefixCache,
        budget: Budget,
    ) -> None:
        self._model = model
        self._make_caches = make_caches
        self._prefix = prefix
        self._budget = budget
        self._short: deque[Row] = deque()
        self._long: deque[Row] = deque()
        self.current: Row | None = None
        """The long prompt in progress; it holds a place in the batch from its first chunk on."""

    def __len__(self) -> int:
        """Prompts that have not begun."""
        return len(self._short) + len(self._long)

    def add(self, row: Row) -> None:
        if row.prompt_length - 1 > self._budget.busy:
            # A hit may leave so little to do that the prompt belongs with the short ones.
            self._look_up(row)
        (self._long if _left(row) > self._budget.busy else self._short).append(row)

    def remove(self, row: Row) -> None:
        """Forget a cancelled row, wherever it is."""
        if row is self.current:
            self.current = None
        for lane in (self._short, self._long):
            if row in lane:
                lane.remove(row)

    def clear(self) -> None:
        self.current = None
        self._short.clear()
        self._long.clear()

    def run(self, places: int, *, busy: bool) -> Prefilled:
        """One turn: at most one short group and one chunk, for at most `places` new rows."""
        result = Prefilled()
        places -= self.current is not None
        if self.current is None and self._long and places > 0 and self._long_goes_first(places):
            self.current = self._long.popleft()
            places -= 1
        if self._short and places > 0:
            self._run_group(plan_group(self._short, places, self._budget), result)
        # Beside an idle batch a fresh group should get its first token before another chunk.
        if self.current is not None and (busy or not result.ready):
            self._run_chunk(self.current, busy, result)
        return result

    def _long_goes_first(self, places: int) -> bool:
        return places > 1 or not self._short or self._long[0].arrival < self._short[0].arrival

    def _run_group(self, group: list[Row], result: Prefilled) -> None:
        for row in group:
            self._short.remove(row)
        try:
            caches = self._group_caches(group, result)
        except Exception as error:
            self._retry(group, error, result)
        else:
            result.ready.append((group, caches))

    def _group_caches(self, group: list[Row], result: Prefilled) -> kv.Caches:
        for row in group:
            self._begin(row)
        rests = [row.tokens[row.prefilled : -1] for row in group]
        caches = kv.merge([row.caches or [] for row in group])
        width = max(len(rest) for rest in rests)
        if width > 0:
            padding = [width - len(rest) for rest in rests]
            if any(padding):
                for cache in caches:
                    cache.prepare(lengths=[len(r) for r in rests], right_padding=padding)
            padded = [rest + [0] * pad for rest, pad in zip(rests, padding, strict=True)]
            self._model(mx.array(padded), cache=caches)
            if any(padding):
                for cache in caches:
                    cache.finalize()
            _evaluate(caches, wait=False)
        for row in group:
            row.caches, row.prefilled = None, row.prompt_length - 1
        result.tokens += sum(len(rest) for rest in rests)
        return caches

    def _retry(self, group: list[Row], error: Exception, result: Prefilled) -> None:
        """A failed group is tried row by row; a row that fails alone is the one to blame."""
        if len(group) == 1:
            result.failed.append((group[0], error))
            return
        for row in reversed(group):
            row.caches, row.prefilled, row.alone = None, 0, True
            self._short.appendleft(row)

    def _run_chunk(self, row: Row, busy: bool, result: Prefilled) -> None:
        try:
            if row.caches is None:
                self._begin(row)
            size = self._budget.busy if busy else self._budget.idle
            end = row.prompt_length - 1
            # A rest of less than a quarter is not worth a turn of its own.
            stop = end if end - row.prefilled <= size + size // 4 else row.prefilled + size
            caches = row.caches or []
            if stop > row.prefilled:
                self._model(mx.array([row.tokens[row.prefilled : stop]]), cache=caches)
                # Nothing else to wait for when idle: do not queue chunks no one can overtake.
                _evaluate(caches, wait=not busy)
        except Exception as error:
            self.current = None
            result.failed.append((row, error))
            return
        result.tokens += stop - row.prefilled
        row.prefilled = stop
        if stop == end:
            self.current = None
            self._prefix.store(row.tokens[:end], partial(kv.part, caches, 1, 0))
            row.caches = None
            result.ready.append(([row], caches))

    def _begin(self, row: Row) -> None:
        if not row.prefilled:
            self._look_up(row)
        if row.caches is None:
            row.caches = self._make_caches()

    def _look_up(self, row: Row) -> None:
        row.caches, row.prefilled = self._prefix.fetch(row.tokens)
        row.cached = row.prefilled


def plan_group(waiting: Sequence[Row] | deque[Row], places: int, budget: Budget) -> list[Row]:
    """The first waiting row and whichever of the next fit beside it without much padding."""
    group = [waiting[0]]
    if waiting[0].alone:
        return group
    shortest = longest = max(_left(waiting[0]), 1)
    most = min(places, budget.rows)
    for row in islice(waiting, 1, 4 * budget.rows):
        if len(group) >= most:
            break
        size = max(_left(row), 1)
        low, high = min(shortest, size), max(longest, size)
        if row.alone or high > 2 * low + PAD_SLACK or high * (len(group) + 1) > budget.busy:
            continue
        group.append(row)
        shortest, longest = low, high
    return group


def _left(row: Row) -> int:
    return row.prompt_length - 1 - row.prefilled


def _evaluate(caches: kv.Caches, *, wait: bool) -> None:
    try:
        (mx.eval if wait else kv.launch)(kv.states(caches))
    except Exception as error:
        raise StepFailed(error, recoverable=False) from error
