"""One decode step: what was launched for which rows, and reading it back into events."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import mlx.core as mx

from smg_grpc_servicer.core.errors import Internal
from smg_grpc_servicer.core.types import Finish, LogprobRows
from smg_grpc_servicer.mlx.runtime.job import Event, Row, describe
from smg_grpc_servicer.mlx.runtime.logprobs import PendingLogprobs


class StepFailed(Exception):
    """A step did not happen. `recoverable`: the caches are as before it, rows may go on."""

    def __init__(self, cause: Exception, *, recoverable: bool) -> None:
        super().__init__(describe(cause))
        self.cause = cause
        self.recoverable = recoverable


@dataclass(frozen=True, slots=True)
class Step:
    """A launched step: for each row its token [n] and the largest logit [n], on the device."""

    rows: tuple[Row, ...]
    tokens: mx.array
    peaks: mx.array
    logprobs: PendingLogprobs | None

    def arrays(self) -> list[mx.array]:
        kept = [] if self.logprobs is None else [self.logprobs.logits]
        return [self.tokens, self.peaks, *kept]

    def read(self) -> list[Event]:
        """Wait for the step; append each row's token to it and tell what happened.

        Rows that ended while the step ran are skipped: their token was never wanted.
        """
        try:
            mx.eval(self.arrays())
        except Exception as error:
            raise StepFailed(error, recoverable=False) from error
        events = []
        tokens: Any = self.tokens.tolist()
        peaks: Any = self.peaks.tolist()
        logprobs = {} if self.logprobs is None else self.logprobs.read(tokens)
        for i, row in enumerate(self.rows):
            if row.done:
                continue
            if math.isfinite(peaks[i]):
                events.append(_advance(row, tokens[i], logprobs.get(i)))
            else:
                # The largest logit is NaN or infinite exactly when the row cannot be sampled.
                events.append(fail(row, ValueError("the model's logits are not finite")))
        return events


def _advance(row: Row, token: int, logprobs: LogprobRows | None) -> Event:
    row.tokens.append(token)
    event = Event(row.job.uid, [token], logprobs)
    if row.cached is not None:
        event.cached_tokens, row.cached = row.cached, None
    if token in row.job.stop_ids:
        event.finish = Finish("stop", matched=token)
        row.done = True
    elif len(row.tokens) - row.prompt_length >= row.job.max_tokens:
        event.finish = Finish("length")
        row.done = True
    return event


def fail(row: Row, cause: Exception) -> Event:
    """End a row with INTERNAL and the cause's own words."""
    row.done = row.failed = True
    return Event(row.uid, error=Internal(f"generation failed: {describe(cause)}"))
