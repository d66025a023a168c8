"""What one request's life looked like, for the metrics and the one log line."""

from __future__ import annotations

from time import monotonic

from smg_grpc_servicer.core.metrics import Metrics
from smg_grpc_servicer.core.wire import Choice


class RequestRecord:
    """Counts and times of one request; told per message, never per token."""

    __slots__ = (
        "_ended",
        "_first",
        "_last",
        "_metrics",
        "_start",
        "cached",
        "finish_reason",
        "generated",
        "prompt",
    )

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics
        self._start = monotonic()
        self._first: float | None = None
        self._last = 0.0
        self._ended = False
        self.prompt = 0
        self.cached = 0
        self.generated = 0
        self.finish_reason = ""
        metrics.request_started()

    def tokens(self, count: int) -> None:
        """`count` new tokens are about to be sent in one message."""
        if not count:
            return
        self.generated += count
        now = monotonic()
        if self._first is None:
            self._first = now
        else:
            self._metrics.tokens(count, now - self._last)
        self._last = now

    def finished(self, choice: Choice, reason: str) -> None:
        """A choice ended; with several choices the prompt counts once and the last reason stays."""
        self.prompt, self.cached = choice.prompt_tokens, choice.cached_tokens
        self.finish_reason = reason

    def end(self, status: str) -> None:
        """The stream is over but for its last message and status, or was refused or cancelled."""
        if self._ended:
            return
        self._ended = True
        self._metrics.request_finished(
            self.finish_reason,
            status,
            prompt=self.prompt,
            cached=self.cached,
            generated=self.generated,
            ttft=None if self._first is None else self._first - self._start,
            e2e=monotonic() - self._start,
        )
