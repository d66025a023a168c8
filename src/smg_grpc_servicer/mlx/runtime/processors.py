"""Logit bias and penalties, for the rows that asked and for nobody else.

Bias is added first, then repetition (divides positive, multiplies negative logits of every token
in prompt or output), then frequency and presence (subtracted, output tokens only), as OpenAI and
vLLM define them. Token counts live on the device and grow by the step's input tokens. Settings and
results are kept within `LIMIT`: the largest float32 a client may send would make logits infinite,
and their log-probabilities NaN.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx
import numpy as np

from smg_grpc_servicer.core.types import Sampling
from smg_grpc_servicer.mlx.runtime.job import Row

LIMIT = 1e30
"""Far beyond any logit, and small enough that its sums, a temperature of 1e-5 and a context's worth
of penalties stay finite in float32."""


class BatchProcessors:
    """`rebuild` when the rows change, `apply` once per step with the tokens fed in that step."""

    def __init__(self) -> None:
        self._index: mx.array | None = None
        self._everyone = False
        self._bias: mx.array | None = None
        self._counts: mx.array | None = None

    def rebuild(self, rows: Sequence[Row], vocab: int) -> None:
        chosen = [i for i, row in enumerate(rows) if wants(row.job.sampling)]
        self._index = mx.array(chosen) if chosen else None
        if not chosen:
            self._bias = self._counts = None
            return
        self._everyone = len(chosen) == len(rows)
        picked = [rows[i] for i in chosen]
        self._bias = _bias_matrix(picked, vocab)
        self._rebuild_penalties(picked, vocab)

    def apply(self, logits: mx.array, inputs: mx.array) -> mx.array:
        """`logits` [rows, vocab] float32 with the rows' settings applied; a new array."""
        if self._index is None:
            return logits
        own = logits if self._everyone else logits[self._index]
        if self._bias is not None:
            own = own + self._bias
        if self._counts is not None:
            own = self._penalise(own, inputs if self._everyone else inputs[self._index])
        own = mx.clip(own, -LIMIT, LIMIT)
        if self._everyone:
            return own
        # A copy: the caller still reduces over the untouched logits.
        result = logits + 0
        result[self._index] = own
        return result

    def _rebuild_penalties(self, rows: Sequence[Row], vocab: int) -> None:
        if not any(_penalises(row.job.sampling) for row in rows):
            self._counts = None
            return
        counts: Any = np.zeros((len(rows), vocab), dtype=np.float32)
        prompts: Any = np.zeros((len(rows), vocab), dtype=np.bool_)
        for i, row in enumerate(rows):
            end = row.prompt_length
            prompts[i, row.tokens[:end]] = True
            fed = row.tokens[end : end + max(row.launched - 1, 0)]
            np.add.at(counts[i], fed, 1.0)
            if row.launched == 0:
                # Its first step feeds the last prompt token, which must not count as output.
                counts[i, row.tokens[end - 1]] = -1.0
        self._counts = mx.array(counts)
        self._lines = mx.arange(len(rows))
        repetition = [
            [min(max(r.job.sampling.repetition_penalty or 1.0, 1 / LIMIT), LIMIT)] for r in rows
        ]
        self._repeats = any(value != [1.0] for value in repetition)
        self._prompts = mx.array(prompts) if self._repeats else None
        self._repetition = mx.array(repetition, dtype=mx.float32)
        self._frequency = mx.array([[_bounded(r.job.sampling.frequency_penalty)] for r in rows])
        self._presence = mx.array([[_bounded(r.job.sampling.presence_penalty)] for r in rows])

    def _penalise(self, logits: mx.array, inputs: mx.array) -> mx.array:
        assert self._counts is not None
        self._counts = self._counts.at[self._lines, inputs].add(1.0)
        seen = self._counts > 0
        if self._prompts is not None:
            scaled = mx.where(logits < 0, logits * self._repetition, logits / self._repetition)
            # Bounded before the subtraction, where two infinities would make a NaN.
            scaled = mx.clip(scaled, -LIMIT, LIMIT)
            logits = mx.where(seen | self._prompts, scaled, logits)
        return logits - self._frequency * self._counts - self._presence * seen


def wants(sampling: Sampling) -> bool:
    return bool(sampling.logit_bias) or _penalises(sampling)


def _penalises(sampling: Sampling) -> bool:
    return bool(
        sampling.frequency_penalty
        or sampling.presence_penalty
        or sampling.repetition_penalty not in (None, 0.0, 1.0)
    )


def _bounded(value: float | None) -> float:
    return min(max(value or 0.0, -LIMIT), LIMIT)


def _bias_matrix(rows: Sequence[Row], vocab: int) -> mx.array | None:
    if not any(row.job.sampling.logit_bias for row in rows):
        return None
    matrix: Any = np.zeros((len(rows), vocab), dtype=np.float32)
    for i, row in enumerate(rows):
        for token, value in row.job.sampling.logit_bias.items():
            matrix[i, token] = _bounded(value)
    return mx.array(matrix)
