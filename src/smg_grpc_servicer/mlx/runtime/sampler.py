"""One sampler for the whole batch: per-row temperature, filters and random key, as arrays.

Filters are those of mlx-lm's `make_sampler`: top_p, min_p and top_k on the unscaled
distribution, then temperature. Each keeps an upper set of the logits, so their chain is one
threshold, the highest of the three. A row's noise depends on its key and its position alone:
a seed gives the same tokens alone, again, and in any batch. Everything is float32.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import mlx.core as mx
import numpy as np

from smg_grpc_servicer.mlx.runtime.job import GREEDY_BELOW, Row

_NO_TOP_P = 2.0
"""Above any cumulative mass, so nothing is dropped."""


class BatchSampler:
    """Call it once per step with logits [rows, vocab]; `rebuild` when the rows change."""

    def __init__(self) -> None:
        self._vocab = 0
        self._gumbel: Any = None
        self._index: mx.array | None = None
        self._sampled = 0
        self._rows = 0

    def rebuild(self, rows: Sequence[Row], vocab: int) -> None:
        """Take over the rows' settings; each row's next position is its `launched` count."""
        self._rows = len(rows)
        if vocab != self._vocab:
            self._vocab = vocab
            self._gumbel = mx.vmap(partial(_noise, vocab))
        chosen = [i for i, row in enumerate(rows) if temperature(row) >= GREEDY_BELOW]
        self._sampled = len(chosen)
        if not chosen:
            return
        picked = [rows[i] for i in chosen]
        self._index = mx.array(chosen)
        self._inverse = mx.array([[1.0 / temperature(row)] for row in picked], dtype=mx.float32)
        keys = [(row.key[0], (row.key[1] + row.launched) & 0xFFFFFFFF) for row in picked]
        self._keys = mx.array(np.array(keys, dtype=np.uint32))
        self._advance = mx.array(np.array([0, 1], dtype=np.uint32))
        self._rebuild_filters(picked)

    def __call__(self, logits: mx.array) -> mx.array:
        if not self._sampled:
            return mx.argmax(logits, axis=-1)
        everyone = self._sampled == self._rows
        own = logits if everyone else logits[self._index]
        noise = self._gumbel(self._keys)
        self._keys = self._keys + self._advance
        if self._filtered:
            own = self._filter(own)
        drawn = mx.argmax(own * self._inverse + noise, axis=-1)
        if everyone:
            return drawn
        tokens = mx.argmax(logits, axis=-1)
        tokens[self._index] = drawn
        return tokens

    def _rebuild_filters(self, rows: Sequence[Row]) -> None:
        vocab = self._vocab
        settings = [(_top_p(row), _min_p(row), _top_k(row, vocab)) for row in rows]
        chosen = [i for i, s in enumerate(settings) if s != (_NO_TOP_P, 0.0, vocab)]
        self._filtered = len(chosen)
        if not chosen:
            return
        picked = [settings[i] for i in chosen]
        self._filter_index = None if len(chosen) == len(rows) else mx.array(chosen)
        self._top_p = mx.array([[s[0]] for s in picked], dtype=mx.float32)
        self._log_min_p = mx.array(
            [[math.log(s[1]) if s[1] > 0 else -math.inf] for s in picked], dtype=mx.float32
        )
        self._sorts = any(s[0] != _NO_TOP_P or s[2] != vocab for s in picked)
        self._uses_top_p = any(s[0] != _NO_TOP_P for s in picked)
        self._candidates = max(s[2] for s in picked)
        self._top_k = mx.array([[self._candidates - s[2]] for s in picked], dtype=mx.int32)

    def _filter(self, logits: mx.array) -> mx.array:
        if self._filter_index is None:
            threshold = self._threshold(logits)
        else:
            # Thresholds are scattered, not logits: those still belong to the caller.
            own = self._threshold(logits[self._filter_index])
            threshold = mx.full((self._sampled, 1), -math.inf, dtype=mx.float32)
            threshold[self._filter_index] = own
        return mx.where(logits < threshold, -math.inf, logits)

    def _threshold(self, logits: mx.array) -> mx.array:
        threshold = mx.max(logits, axis=-1, keepdims=True) + self._log_min_p
        if not self._sorts:
            return threshold
        best = logits
        if self._candidates < self._vocab:
            # All rows have a top_k: nothing below the largest of them can survive.
            best = mx.topk(logits, self._candidates, axis=-1)
        ascending = mx.sort(best, axis=-1)
        threshold = mx.maximum(threshold, mx.take_along_axis(ascending, self._top_k, axis=-1))
        if self._uses_top_p:
            threshold = mx.maximum(threshold, self._nucleus(logits, ascending))
        return threshold

    def _nucleus(self, logits: mx.array, ascending: mx.array) -> mx.array:
        peak = ascending[:, -1:]
        mass = mx.exp(ascending - peak)
        above = mx.cumsum(mass, axis=-1, reverse=True, inclusive=False)
        if self._candidates < self._vocab:
            total = mx.sum(mx.exp(logits - peak), axis=-1, keepdims=True)
        else:
            total = above[:, :1] + mass[:, :1]
        dropped = mx.sum(above >= self._top_p * total, axis=-1, keepdims=True)
        return mx.take_along_axis(ascending, dropped, axis=-1)


def _noise(vocab: int, key: mx.array) -> mx.array:
    return mx.random.gumbel((vocab,), key=key)


def temperature(row: Row) -> float:
    """Unset means 1, as the proto says."""
    value = row.job.sampling.temperature
    return 1.0 if value is None else value


def _top_p(row: Row) -> float:
    value = row.job.sampling.top_p
    return _NO_TOP_P if value is None or not 0 < value < 1 else value


def _min_p(row: Row) -> float:
    value = row.job.sampling.min_p
    return 0.0 if value is None else value


def _top_k(row: Row, vocab: int) -> int:
    value = row.job.sampling.top_k
    return vocab if value is None or not 0 < value < vocab else value
