"""SGLang's output batches to core deltas: one `Relay` per choice, one `Flight` per request.

A relay is called once per batch its choice is in, on the event loop, and puts straight into the
mailbox; nothing is kept here while a request streams. Nothing is put after the end.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from smg_grpc_servicer.core.mailbox import Mailbox
from smg_grpc_servicer.core.payloads import HiddenStates
from smg_grpc_servicer.core.types import (
    Delta,
    Finish,
    GenerateSpec,
)
from smg_grpc_servicer.sglang.failures import from_abort
from smg_grpc_servicer.sglang.logprobs import output_rows, prompt_rows

log = logging.getLogger(__name__)


class Sink(Protocol):
    """Whoever waits for what the scheduler says about one id."""

    def output(self, batch: Any, at: int) -> None:
        """Row `at` of an output batch is about it."""

    def aborted(self, reason: Mapping[str, Any] | None) -> None:
        """The scheduler ended it outside of an output batch."""

    def failed(self, error: Exception) -> None:
        """Nothing will come any more."""


class Relay:
    """One choice's way from the scheduler to its request's mailbox."""

    __slots__ = ("_flight", "_index", "_mailbox", "_plain", "_scores", "_spec", "rid")

    def __init__(self, rid: str, index: int, spec: GenerateSpec, flight: Flight) -> None:
        self.rid = rid
        self._index = index
        self._spec = spec
        self._scores = spec.logprobs.output is not None
        self._plain = False
        """Its counts are told and nothing but ids comes before its end."""
        self._flight = flight
        self._mailbox = flight.mailbox

    def output(self, batch: Any, at: int) -> None:
        if self._plain and batch.finished_reasons[at] is None:
            self._mailbox.put_ids(self._index, batch.output_ids[at])
            return
        self._plain = not (self._scores or self._spec.count_reasoning)
        self._flight.unanswered = 0
        delta = Delta(
            self._index,
            list(batch.output_ids[at]),
            None,
            None,
            batch.prompt_tokens[at],
            batch.cached_tokens[at],
            batch.reasoning_tokens[at],
        )
        reason = batch.finished_reasons[at]
        if reason is not None:
            kind = reason["type"]
            if kind == "abort":
                error = from_abort(reason, self._spec.sampling.constraint)
                if error is not None:
                    # Such a row has a token and a count that mean nothing.
                    self._flight.fail(error, self)
                    return
            delta.finish = self._finish(batch, at, kind, reason)
        if self._scores:
            delta.logprobs = output_rows(batch, at, len(delta.token_ids), self._spec.logprobs)
            if self._spec.logprobs.prompt is not None:
                delta.prompt_logprobs = prompt_rows(batch, at, self._spec.logprobs)
        self._mailbox.put(delta)
        if reason is not None:
            self._flight.ended(self)

    def aborted(self, reason: Mapping[str, Any] | None) -> None:
        error = from_abort(reason or {}, self._spec.sampling.constraint)
        if error is not None:
            self._flight.fail(error, self)
            return
        self._mailbox.put(Delta(self._index, finish=Finish("abort")))
        self._flight.ended(self)

    def failed(self, error: Exception) -> None:
        self._flight.fail(error)

    def _finish(self, batch: Any, at: int, kind: str, reason: Mapping[str, Any]) -> Finish:
        # The model's own end is not the client's, who would be shown it.
        matched = reason.get("matched")
        sampling = self._spec.sampling
        if isinstance(matched, str):
            matched = matched if matched in sampling.stop else None
        elif isinstance(matched, list) or matched not in sampling.stop_token_ids:
            matched = None
        accepted, drafted = self._speculation(batch, at)
        hidden = None
        if self._spec.hidden_states and batch.output_hidden_states:
            hidden = hidden_states(batch.output_hidden_states[at], batch.cached_tokens[at])
        return Finish(kind, matched, accepted, drafted, None, hidden)

    def _speculation(self, batch: Any, at: int) -> tuple[int | None, int | None]:
        """Draft tokens accepted and proposed; the columns are empty without a draft model."""
        steps, correct = batch.spec_verify_ct, batch.spec_num_correct_drafts
        if not steps or not correct:
            return None, None
        per_step = self._flight.drafts_per_step
        return correct[at], None if per_step is None else steps[at] * per_step


class Flight:
    """One request at the scheduler: its choices and their end, which comes once.

    `drop(rid)` forgets an id, `stop(rid)` tells the scheduler too; `on_end` is called last.
    """

    __slots__ = ("_drop", "_on_end", "_stop", "drafts_per_step", "mailbox", "open", "unanswered")

    def __init__(
        self,
        mailbox: Mailbox,
        *,
        drop: Callable[[str], None],
        stop: Callable[[str], None],
        on_end: Callable[[], None],
        prompt_tokens: int = 0,
        drafts_per_step: int | None = None,
    ) -> None:
        self.mailbox = mailbox
        self.unanswered = prompt_tokens
        """Prompt tokens that the scheduler may still have to compute: 0 from its first word on."""
        self.open: dict[str, Any] = {}
        """Ids the scheduler has, by id."""
        self.drafts_per_step = drafts_per_step
        self._drop = drop
        self._stop = stop
        self._on_end: Callable[[], None] | None = on_end

    @property
    def closed(self) -> bool:
        return self._on_end is None

    def began(self, sink: Any) -> None:
        self.open[sink.rid] = sink

    def ended(self, sink: Any, *, last: bool = True) -> None:
        """The scheduler is done with this id; `last` unless more of the request follows."""
        self._drop(sink.rid)
        del self.open[sink.rid]
        if last and not self.open:
            self._close()

    def fail(self, error: Exception, done: Any = None) -> None:
        """One choice failed, so the request does: the others are stopped, and it too unless
        the scheduler is `done` with it.
        """
        self.mailbox.fail(error)
        if done is not None:
            self._drop(done.rid)
            self.open.pop(done.rid, None)
        self.stop()

    def stop(self) -> None:
        """End it here and at the scheduler; nothing when it has ended."""
        rids = list(self.open)
        self.open.clear()
        for rid in rids:
            self._drop(rid)
            self._stop(rid)
        self._close()

    def _close(self) -> None:
        # Dropped after use: it leads back here, and a circle would wait for the collector.
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end()


class Prefix:
    """The pass over a prompt that several choices share; its token is thrown away."""

    __slots__ = ("_flight", "_spec", "_then", "rid")

    def __init__(
        self, rid: str, spec: GenerateSpec, flight: Flight, then: Callable[[], None]
    ) -> None:
        self.rid = rid
        self._spec = spec
        self._flight = flight
        self._then = then

    def output(self, batch: Any, at: int) -> None:
        reason = batch.finished_reasons[at]
        if reason is None:
            return
        if reason["type"] == "abort":
            self.aborted(reason)
            return
        self._flight.unanswered = 0
        self._flight.ended(self, last=False)
        self._then()

    def aborted(self, reason: Mapping[str, Any] | None) -> None:
        """What refuses the prompt refuses the request."""
        error = from_abort(reason or {}, self._spec.sampling.constraint)
        if error is not None:
            self._flight.fail(error, self)
            return
        for index in range(self._spec.sampling.n):
            self._flight.mailbox.put(Delta(index, finish=Finish("abort")))
        self._flight.ended(self)

    def failed(self, error: Exception) -> None:
        self._flight.fail(error)


def hidden_states(chunks: Sequence[Any] | None, first_position: int) -> HiddenStates | None:
    """SGLang keeps a block of rows for the prompt and then one row per step; or one row only."""
    if not chunks:
        return None
    if not isinstance(chunks[0], (list, tuple)):
        return HiddenStates(-1, (tuple(chunks),))
    rows: list[Sequence[float]] = []
    for chunk in chunks:
        if chunk and isinstance(chunk[0], (list, tuple)):
            rows += chunk
        else:
            rows.append(chunk)
    return HiddenStates(first_position, rows)
