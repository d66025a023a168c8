"""What the generation thread does in a turn, and how it takes failures.

A step that cannot be built is rolled back and costs only the rows that make it fail; when no
such row can be told apart, or the step was lost while it ran, the rows in it end with INTERNAL
and the batch starts afresh; three such steps in a row end the thread, and so do three failed rows
without a success between them if a plain prompt then fails too. Times are monotonic seconds.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import mlx.core as mx

from smg_grpc_servicer.core.types import Finish
from smg_grpc_servicer.mlx.runtime import caches as kv
from smg_grpc_servicer.mlx.runtime import rotary
from smg_grpc_servicer.mlx.runtime.decode import DecodeBatch
from smg_grpc_servicer.mlx.runtime.inbox import Inbox
from smg_grpc_servicer.mlx.runtime.job import Event, Row, describe
from smg_grpc_servicer.mlx.runtime.prefill import Budget, Prefill
from smg_grpc_servicer.mlx.runtime.prefix_cache import PrefixCache
from smg_grpc_servicer.mlx.runtime.steps import Step, StepFailed, fail

logger = logging.getLogger(__name__)

FAILED_STEPS_LIMIT = 3
CLEAR_EVERY = 512
"""Steps between returns of mlx's free buffers to the system, as mlx-lm does."""

Deliver = Callable[[list[Event]], None]


class Died(Exception):
    """The thread must end; the message says why."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much runs at once."""

    places: int = 32
    """Rows that generate together."""
    budget: Budget = field(default_factory=Budget)
    prompt_cache_bytes: int = 1 << 30


class Worker:
    """Built and used on the generation thread; counters and gauges may be read from any."""

    def __init__(self, model: Any, limits: Limits, inbox: Inbox, deliver: Deliver) -> None:
        self._inbox = inbox
        self._deliver = deliver
        batchable = kv.can_batch(model)
        self._places = inbox.places = limits.places if batchable else 1
        if not batchable:
            logger.warning("this model's caches cannot be merged: requests run one at a time")
        self._model = model
        kv.prove(model)
        reusable = batchable and all(c.is_trimmable() for c in kv.make(model))
        self.prefix = PrefixCache(limits.prompt_cache_bytes if reusable else 0)
        on_cpu = mx.default_device() == mx.cpu
        around = rotary.share(model) if on_cpu and batchable else nullcontext()
        self._batch = DecodeBatch(model, self.prefix, around)
        # On a CPU mlx runs ahead by ten operations; a GPU takes a whole step and must not be idle.
        self._launch_waits = on_cpu
        self._prefill = Prefill(model, lambda: kv.make(model), self.prefix, limits.budget)
        self._failures = 0
        self._failed_rows = 0
        """Rows that failed alone since a step last succeeded."""
        self._unexplained = False
        self._pending: Step | None = None
        self._events: list[Event] = []
        self.last_progress = time.monotonic()
        self.counters = dict.fromkeys(
            ("turns", "steps", "generated_tokens", "prefilled_tokens", "failed_steps"), 0
        )

    def statistics(self) -> dict[str, int]:
        return {
            "running": len(self._batch.rows),
            "prefilling": int(self._prefill.current is not None),
            "unread_steps": int(self._pending is not None),
        }

    def turn(self) -> bool:
        """Do one round of work, sleeping first when there is none; False to end."""
        idle = not (
            self._batch.rows or self._pending or len(self._prefill) or self._prefill.current
        )
        fresh, cancelled, stopping = self._inbox.take(wait=idle)
        if stopping:
            return False
        self.counters["turns"] += 1
        for row in fresh:
            self._prefill.add(row)
        for row in cancelled:
            self._cancel(row)
        try:
            self._decode()
        except Died:
            raise
        except Exception as error:
            logger.exception("a turn failed outside the model")
            self._lose(StepFailed(error, recoverable=False), ())
        self._hand_over()
        self._fill()
        self._hand_over()
        return True

    def undelivered(self) -> list[Event]:
        """Events of a turn that was cut short; whoever ends the thread hands them over."""
        events, self._events = self._events, []
        return events

    def release(self) -> None:
        """Drop all mlx state."""
        self._batch.clear()
        self.prefix.clear()
        self._pending = None
        self._prefill.clear()

    def _decode(self) -> None:
        self._batch.prune()
        if not self._batch.rows:
            self._settle()
            return
        try:
            step = self._batch.build()
        except StepFailed as failure:
            self._recover(failure)
            return
        if self._launch_waits:
            # Nearly a step's time, which tokens would wait; whoever sends them has it now.
            self._settle()
            self._hand_over()
        if not self._launch(step):
            return
        if not self._launch_waits:
            self._settle()
        # A step lost just now took this one's rows with it.
        self._pending = step if self._batch.rows else None

    def _launch(self, step: Step) -> bool:
        """Start it, unless the one before was lost and took its rows with it."""
        if not self._batch.rows:
            return False
        try:
            self._batch.launch(step)
        except StepFailed as failure:
            self._recover(failure)
            return False
        return True

    def _settle(self) -> None:
        """Read the step launched a turn ago."""
        step, self._pending = self._pending, None
        if step is None:
            return
        try:
            events = step.read()
        except StepFailed as failure:
            self._lose(failure, step.rows)
            return
        self._events += events
        self._failures, self._failed_rows, self._unexplained = 0, 0, False
        self.last_progress = time.monotonic()
        self.counters["generated_tokens"] += len(events)
        self.counters["steps"] += 1
        if self.counters["steps"] % CLEAR_EVERY == 0:
            mx.clear_cache()

    def _recover(self, failure: StepFailed) -> None:
        """A step could not be started: end the rows that cause it, the others go on."""
        logger.warning("a generation step failed: %s", failure)
        self.counters["failed_steps"] += 1
        self._settle()
        self._batch.prune()
        if not self._batch.rows:
            return
        if not failure.recoverable or self._unexplained:
            self._lose(failure, ())
            return
        culprits = self._batch.find_culprits()
        # Without a culprit the step is simply tried again, once.
        self._unexplained = not culprits
        for row, error in culprits:
            self._events.append(fail(row, error))
        self._suspect(len(culprits))

    def _lose(self, failure: StepFailed, also: tuple[Row, ...]) -> None:
        """Fail all rows of the batch, and of a step that was lost, and begin afresh."""
        logger.error("a generation step was lost: %s", failure)
        for row in dict.fromkeys((*also, *self._batch.rows)):
            if not row.done:
                self._events.append(fail(row, failure.cause))
        self._batch.clear()
        self.prefix.clear()
        self._unexplained = False
        self._count_failure(failure)

    def _count_failure(self, failure: StepFailed) -> None:
        self._failures += 1
        if self._failures >= FAILED_STEPS_LIMIT:
            raise Died(f"{self._failures} generation steps failed in a row: {failure}")

    def _fill(self) -> None:
        if not (len(self._prefill) or self._prefill.current):
            return
        running = len(self._batch.rows)
        result = self._prefill.run(self._places - running, busy=running > 0)
        for rows, caches in result.ready:
            try:
                self._batch.add(rows, caches)
            except Exception as error:
                self._lose(StepFailed(error, recoverable=False), tuple(rows))
        if result.tokens:
            self.counters["prefilled_tokens"] += result.tokens
            self.last_progress = time.monotonic()
        for row, fault in result.failed:
            logger.warning("the prompt of request %s failed: %s", row.uid, fault)
            lost = fault if isinstance(fault, StepFailed) else None
            self._events.append(fail(row, fault if lost is None else lost.cause))
            if lost is not None:
                self._count_failure(lost)
        self._suspect(len(result.failed))

    def _suspect(self, failed: int) -> None:
        """Rows failed alone and nothing has worked since: is it the rows, or the model?"""
        self._failed_rows += failed
        if not failed or self._failed_rows < FAILED_STEPS_LIMIT:
            return
        try:
            kv.prove(self._model)
        except Exception as error:
            raise Died(f"every request fails, a plain one too: {describe(error)}") from error
        self._failed_rows = 0

    def _cancel(self, row: Row) -> None:
        if row.done:
            return
        row.done = row.failed = True
        self._prefill.remove(row)
        self._events.append(Event(row.uid, finish=Finish("abort")))

    def _hand_over(self) -> None:
        """One call for all that has piled up."""
        events = self.undelivered()
        if events:
            self._inbox.finish(e.uid for e in events if e.last)
            self._deliver(events)
