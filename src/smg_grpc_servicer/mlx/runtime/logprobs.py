"""Log-probabilities of the step's tokens, for the rows that asked.

Natural logarithms, float32, of the distribution after bias and penalties and before temperature
and filters. Computed on the device with the step; rows that want the whole vocabulary are kept
apart so that they do not make the others' short lists long.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from smg_grpc_servicer.core.types import LogprobRows
from smg_grpc_servicer.mlx.runtime.job import Row


@dataclass(frozen=True, slots=True)
class _Group:
    """Rows that are answered from one selection of the `width` best ids."""

    rows: tuple[int, ...]
    counts: tuple[int, ...]
    width: int
    index: mx.array | None
    """None when the group is the whole batch."""


@dataclass(frozen=True, slots=True)
class PendingLogprobs:
    """Device results of one step: own values [n], best ids and values [n, width]."""

    group: _Group
    own: mx.array
    ids: mx.array | None
    values: mx.array | None

    def arrays(self) -> list[mx.array]:
        return [a for a in (self.own, self.ids, self.values) if a is not None]

    def read(self, into: dict[int, LogprobRows]) -> None:
        """Add each row's entry under its place in the batch; the arrays must be evaluated."""
        own: Any = self.own.tolist()
        ids: Any = self.ids.tolist() if self.ids is not None else None
        values: Any = self.values.tolist() if self.values is not None else None
        for i, (row, count) in enumerate(zip(self.group.rows, self.group.counts, strict=True)):
            best = ids[i][:count] if ids is not None else []
            into[row] = LogprobRows(
                [own[i]], [best], [values[i][:count] if values is not None else []]
            )


class BatchLogprobs:
    """`rebuild` when the rows change, `compute` once per step."""

    def __init__(self) -> None:
        self._groups: list[_Group] = []

    def rebuild(self, rows: Sequence[Row], vocab: int) -> None:
        wanted = [
            (i, vocab if n < 0 else min(n, vocab))
            for i, row in enumerate(rows)
            if (n := row.job.logprobs) is not None
        ]
        self._groups = []
        for members in (
            [(i, n) for i, n in wanted if n < vocab],
            [(i, n) for i, n in wanted if n == vocab],
        ):
            if members:
                places = tuple(i for i, _ in members)
                counts = tuple(n for _, n in members)
                index = None if len(places) == len(rows) else mx.array(list(places))
                self._groups.append(_Group(places, counts, max(counts), index))

    def compute(self, logits: mx.array, tokens: mx.array) -> list[PendingLogprobs]:
        """Build the step's selections from processed logits [rows, vocab] and its tokens."""
        return [_select(group, logits, tokens) for group in self._groups]


def _select(group: _Group, logits: mx.array, tokens: mx.array) -> PendingLogprobs:
    if group.index is not None:
        logits, tokens = logits[group.index], tokens[group.index]
    top = mx.max(logits, axis=-1, keepdims=True)
    norm = top + mx.log(mx.sum(mx.exp(logits - top), axis=-1, keepdims=True))
    own = (mx.take_along_axis(logits, tokens[:, None], axis=-1) - norm)[:, 0]
    if group.width == 0:
        return PendingLogprobs(group, own, None, None)
    if group.width < logits.shape[-1]:
        best = mx.argpartition(-logits, kth=group.width - 1, axis=-1)[:, : group.width]
        values = mx.take_along_axis(logits, best, axis=-1)
        order = mx.argsort(-values, axis=-1)
        ids = mx.take_along_axis(best, order, axis=-1)
    else:
        ids = mx.argsort(-logits, axis=-1)
    values = mx.take_along_axis(logits, ids, axis=-1) - norm
    return PendingLogprobs(group, own, ids, values)
