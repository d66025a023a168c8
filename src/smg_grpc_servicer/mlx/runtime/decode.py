"""The rows that are generating: one batch, one model call per step.

A row joins with all of its prompt but the last token in its caches; that token is its first
step's input, so the first output token is sampled like every other. The next step is built before
the previous one is read: inputs stay on the device.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import mlx.core as mx

from smg_grpc_servicer.mlx.runtime import caches as kv
from smg_grpc_servicer.mlx.runtime.job import Row
from smg_grpc_servicer.mlx.runtime.logprobs import BatchLogprobs
from smg_grpc_servicer.mlx.runtime.prefix_cache import PrefixCache
from smg_grpc_servicer.mlx.runtime.processors import BatchProcessors
from smg_grpc_servicer.mlx.runtime.sampler import BatchSampler
from smg_grpc_servicer.mlx.runtime.steps import Step, StepFailed

Model = Callable[..., Any]


class DecodeBatch:
    def __init__(
        self,
        model: Model,
        prefix: PrefixCache,
        around: AbstractContextManager[None] | None = None,
    ) -> None:
        """`around` is entered for every call of the model."""
        self.rows: list[Row] = []
        self._model = model
        self._around = around or nullcontext()
        self._prefix = prefix
        self._caches: kv.Caches = []
        self._inputs: Any = None
        self._stale = True
        """Rows changed, or a step was rolled back: per-row arrays must be built again."""
        self._sampler = BatchSampler()
        self._processors = BatchProcessors()
        self._logprobs = BatchLogprobs()

    def add(self, rows: Sequence[Row], caches: kv.Caches) -> None:
        """Take over prefilled rows and their merged caches."""
        last = mx.array([row.tokens[-1] for row in rows], dtype=mx.uint32)
        self._inputs = mx.concatenate([self._inputs, last]) if self.rows else last
        self._caches = kv.join(self._caches, len(self.rows), caches, len(rows))
        self.rows.extend(rows)
        self._stale = True

    def prune(self) -> None:
        """Let go of rows that ended or whose last step is launched; keep their caches' worth."""
        going = [i for i, row in enumerate(self.rows) if row.done or row.exhausted]
        if not going:
            return
        count = len(self.rows)
        for i in going:
            row = self.rows[i]
            if not row.failed:
                self._prefix.store(row.fed, partial(kv.part, self._caches, count, i))
        gone = set(going)
        self._keep([i for i in range(count) if i not in gone])

    def build(self) -> Step:
        """The next step of all rows, not started. Raises StepFailed; no row has advanced then."""
        before = kv.sizes(self._caches)
        try:
            return self._build()
        except Exception as error:
            self._stale = True
            raise StepFailed(error, recoverable=kv.roll_back(self._caches, before)) from error

    def launch(self, step: Step) -> None:
        """Start the step that was just built. Raises StepFailed, which is not recoverable."""
        try:
            kv.launch(step.arrays())
        except Exception as error:
            raise StepFailed(error, recoverable=False) from error
        self._inputs = step.tokens
        for row in self.rows:
            row.launched += 1

    def find_culprits(self) -> list[tuple[Row, Exception]]:
        """Rows that make the next step fail, found by running halves of the batch on copies."""
        count = len(self.rows)
        alone = [kv.extract(self._model, self._caches, count, i) for i in range(count)]

        def search(group: list[int]) -> list[tuple[Row, Exception]]:
            error = self._trial(group, alone)
            if error is None:
                return []
            if len(group) == 1:
                return [(self.rows[group[0]], error)]
            middle = len(group) // 2
            return search(group[:middle]) + search(group[middle:])

        return search(list(range(count)))

    def clear(self) -> None:
        self._keep([])

    def _build(self) -> Step:
        with self._around:
            logits = self._model(self._inputs[:, None], cache=self._caches)[:, -1, :]
        if logits.dtype != mx.float32:
            logits = logits.astype(mx.float32)
        if self._stale:
            vocab = logits.shape[-1]
            self._sampler.rebuild(self.rows, vocab)
            self._processors.rebuild(self.rows, vocab)
            self._logprobs.rebuild(self.rows, vocab)
            self._stale = False
        peaks = mx.max(logits, axis=-1)
        logits = self._processors.apply(logits, self._inputs)
        tokens = self._sampler(logits)
        return Step(tuple(self.rows), tokens, peaks, self._logprobs.keep(logits))

    def _trial(self, group: list[int], alone: list[kv.Caches]) -> Exception | None:
        parts = [alone[i] for i in group]
        caches = copy.deepcopy(parts[0]) if len(parts) == 1 else kv.merge(parts)
        try:
            self._model(self._inputs[mx.array(group)][:, None], cache=caches)
        except Exception as error:
            return error
        return None

    def _keep(self, indices: list[int]) -> None:
        if indices:
            self._caches = kv.keep(self._model, self._caches, len(self.rows), indices)
            self._inputs = self._inputs[mx.array(indices)]
        else:
            self._caches, self._inputs = [], None
        self.rows = [self.rows[i] for i in indices]
        self._stale = True
