"""Log-probabilities of the step's tokens, for the rows that asked.

Natural logarithms, float32, of the distribution after bias and penalties and before temperature
and filters. The logits of those rows are kept until the step is read and reduced with numpy
then, while the device computes the next step: nothing is added to the device's work (and numpy's
float32 exp is twenty times mlx's on an x86 CPU).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from smg_grpc_servicer.core.types import LogprobRows
from smg_grpc_servicer.mlx.runtime.job import Row

FEW = 24
"""Up to this many best ids, repeated argmax is cheaper than a partition."""


class BatchLogprobs:
    """`rebuild` when the rows change, `keep` once per step."""

    def __init__(self) -> None:
        self._wanted: tuple[tuple[int, int], ...] = ()
        self._index: Any = None
        self._everyone = False

    def rebuild(self, rows: Sequence[Row], vocab: int) -> None:
        self._wanted = tuple(
            (i, vocab if n < 0 else min(n, vocab))
            for i, row in enumerate(rows)
            if (n := row.job.logprobs) is not None
        )
        self._everyone = len(self._wanted) == len(rows)
        if self._wanted:
            self._index = mx.array([i for i, _ in self._wanted])

    def keep(self, logits: mx.array) -> PendingLogprobs | None:
        """Note the processed logits [rows, vocab] of a step; None when nobody asked."""
        if not self._wanted:
            return None
        return PendingLogprobs(self._wanted, logits if self._everyone else logits[self._index])


class PendingLogprobs:
    """One step's logits [n, vocab] for the n rows that asked, and (place, count) of each."""

    __slots__ = ("_wanted", "logits")

    def __init__(self, wanted: tuple[tuple[int, int], ...], logits: mx.array) -> None:
        self._wanted = wanted
        self.logits = logits

    def read(self, tokens: Sequence[int]) -> dict[int, LogprobRows]:
        """Each asking row's entry by its place in the batch, given the whole batch's tokens."""
        logits = np.array(self.logits, copy=False)
        peak = logits.max(axis=-1, keepdims=True)
        # A row that is not finite ends with an error; its numbers are never shown.
        with np.errstate(all="ignore"):
            norms = peak + np.log(np.exp(logits - peak).sum(axis=-1, keepdims=True))
        chosen = [tokens[place] for place, _ in self._wanted]
        own = (logits[np.arange(len(chosen)), chosen] - norms[:, 0]).tolist()
        counts = [count for _, count in self._wanted]
        ids, values = _best(logits, norms, [n for n in counts if n <= FEW])
        result = {}
        for i, (place, count) in enumerate(self._wanted):
            if count <= FEW:
                entry = (ids[i][:count], values[i][:count])
            else:
                entry = _many(logits[i], norms[i], count)
            result[place] = LogprobRows([own[i]], [entry[0]], [entry[1]])
        return result


def _best(logits: Any, norms: Any, counts: list[int]) -> tuple[list[list[int]], list[list[float]]]:
    """The best ids of every row, for the largest of the small counts."""
    width = max(counts, default=0)
    if width == 0:
        return [[] for _ in logits], [[] for _ in logits]
    rest = logits.copy()
    lines = np.arange(len(logits))
    ids: Any = np.empty((len(logits), width), dtype=np.int64)
    for i in range(width):
        ids[:, i] = rest.argmax(axis=-1)
        rest[lines, ids[:, i]] = -np.inf
    values = np.take_along_axis(logits, ids, axis=-1) - norms
    return ids.tolist(), values.tolist()


def _many(logits: Any, norm: Any, count: int) -> tuple[list[int], list[float]]:
    """The `count` best ids of one row."""
    if count < len(logits):
        picked = np.argpartition(logits, -count)[-count:]
    else:
        picked = np.arange(len(logits))
    order = picked[np.argsort(-logits[picked], kind="stable")]
    return order.tolist(), (logits[order] - norm).tolist()
