"""The generation thread: it alone touches mlx once it runs.

Each turn: take jobs and cancels, launch a decode step, read the one before, hand its events
over, then prefill within the budget. It sleeps on a condition when there is nothing to do.
Times are monotonic seconds. A step that fails costs only the rows that make it fail; when no
such row can be told apart, the rows in it; three such steps in a row end the thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from smg_grpc_servicer.core.errors import EngineDead, Unavailable
from smg_grpc_servicer.core.types import Finish
from smg_grpc_servicer.mlx.runtime import caches as kv
from smg_grpc_servicer.mlx.runtime.decode import DecodeBatch
from smg_grpc_servicer.mlx.runtime.inbox import Inbox
from smg_grpc_servicer.mlx.runtime.job import Event, Job, Row
from smg_grpc_servicer.mlx.runtime.prefill import Budget, Prefill
from smg_grpc_servicer.mlx.runtime.prefix_cache import PrefixCache
from smg_grpc_servicer.mlx.runtime.steps import Step, StepFailed, describe, fail

logger = logging.getLogger(__name__)

FAILED_STEPS_LIMIT = 3
CLEAR_EVERY = 512
"""Steps between returns of mlx's free buffers to the system, as mlx-lm does."""

Deliver = Callable[[list[Event]], None]


class _Died(Exception):
    """The thread must end; the message says why."""


class GenerationLoop:
    """Runs jobs on a model. `deliver` and `on_death` are called on the generation thread."""

    def __init__(
        self,
        model: Any,
        *,
        deliver: Deliver,
        on_death: Callable[[str], None] = lambda reason: None,
        prefill_batch_size: int = 8,
        completion_batch_size: int = 32,
        prefill_budget: int = 256,
        idle_prefill_budget: int = 512,
        prompt_cache_bytes: int = 1 << 30,
        max_queued: int = 1024,
    ) -> None:
        self._model = model
        self._deliver = deliver
        self._on_death = on_death
        self._budget = Budget(prefill_budget, idle_prefill_budget, prefill_batch_size)
        self._places = completion_batch_size
        self._prompt_cache_bytes = prompt_cache_bytes
        self._inbox = Inbox(max_queued)
        self._thread = threading.Thread(target=self._run, name="mlx-generation", daemon=True)
        self._ready = threading.Event()
        self._start_error: Exception | None = None
        self._counters = dict.fromkeys(
            ("turns", "steps", "generated_tokens", "prefilled_tokens", "failed_steps"), 0
        )
        self._failures = 0
        self._unexplained = False
        self._pending: Step | None = None
        self._events: list[Event] = []
        self.last_progress = time.monotonic()
        """When a step or a prompt chunk last came to an end."""

    # Called from anywhere.

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Whether jobs run; raises what kept the thread from starting."""
        ready = self._ready.wait(timeout)
        if self._start_error is not None:
            raise self._start_error
        return ready and self.alive

    def submit(self, job: Job) -> None:
        """Accept a job; it gets exactly one last event. Raises Exhausted or Unavailable."""
        self._inbox.submit(job)

    def cancel(self, uid: str) -> None:
        """End a job with `Finish("abort")` at the next turn; nothing if it has ended."""
        self._inbox.cancel(uid)

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread; what still runs gets Unavailable. False when it did not end in time."""
        self._inbox.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._inbox.closed is None

    @property
    def in_flight(self) -> int:
        return self._inbox.in_flight

    def statistics(self) -> dict[str, int]:
        """What is held right now; all zero when nothing is in flight."""
        held = self._inbox.statistics()
        if self._ready.is_set() and self._start_error is None:
            held["running"] = len(self._batch.rows)
            held["prefilling"] = int(self._prefill.current is not None)
            held["unread_steps"] = int(self._pending is not None)
        return held

    def counters(self) -> dict[str, int]:
        """What happened since the start, and the prefix cache's size."""
        if not self._ready.is_set() or self._start_error is not None:
            return dict(self._counters)
        return self._counters | self._prefix.counters()

    # The generation thread.

    def _run(self) -> None:
        reason = "the generation thread was ended from outside"
        try:
            with mx.stream(mx.new_stream(mx.default_device())):
                try:
                    self._prepare()
                except Exception as error:
                    self._start_error = error
                    raise _Died(f"the model does not run: {describe(error)}") from error
                self._ready.set()
                while self._turn():
                    pass
            reason = ""
        except _Died as died:
            reason = str(died)
        except Exception as error:
            logger.exception("the generation thread failed")
            reason = f"the generation thread failed: {describe(error)}"
        finally:
            self._end(reason)

    def _prepare(self) -> None:
        """Build everything mlx on this thread and prove that the model runs on it."""
        _, batchable = kv.probe(self._model)
        if not batchable:
            logger.warning("this model's caches cannot be merged: requests run one at a time")
            self._places = 1

        def make_caches() -> kv.Caches:
            from mlx_lm.models.cache import make_prompt_cache

            caches: kv.Caches = make_prompt_cache(self._model)
            return caches

        fresh = make_caches()
        trimmable = batchable and all(c.is_trimmable() for c in fresh)
        self._prefix = PrefixCache(self._prompt_cache_bytes, enabled=trimmable)
        self._batch = DecodeBatch(self._model, self._prefix)
        self._prefill = Prefill(self._model, make_caches, self._prefix, self._budget)
        self._model(mx.array([[0, 0]]), cache=fresh)
        mx.eval(self._model(mx.array([[0]]), cache=fresh))

    def _turn(self) -> bool:
        idle = not (
            self._batch.rows or self._pending or len(self._prefill) or self._prefill.current
        )
        fresh, cancelled, stopping = self._inbox.take(wait=idle)
        if stopping:
            return False
        self._counters["turns"] += 1
        for row in fresh:
            self._prefill.add(row)
        for row in cancelled:
            self._cancel(row)
        self._decode()
        self._hand_over()
        self._fill()
        self._hand_over()
        self._inbox.set_queued(len(self._prefill))
        return True

    def _decode(self) -> None:
        self._batch.prune()
        if not self._batch.rows:
            self._settle()
            return
        try:
            step = self._batch.launch()
        except StepFailed as failure:
            self._recover(failure)
            return
        self._settle()
        # A lost step took all rows with it, those of this one too.
        self._pending = step if self._batch.rows else None

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
        self._failures, self._unexplained = 0, False
        self.last_progress = time.monotonic()
        self._counters["generated_tokens"] += len(events)
        self._counters["steps"] += 1
        if self._counters["steps"] % CLEAR_EVERY == 0:
            mx.clear_cache()

    def _recover(self, failure: StepFailed) -> None:
        """A step could not be built: end the rows that cause it, leave the others as they were."""
        self._counters["failed_steps"] += 1
        logger.warning("a generation step failed: %s", failure)
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

    def _lose(self, failure: StepFailed, also: tuple[Row, ...]) -> None:
        """Fail all rows of the batch (and of a lost step) and begin with empty caches."""
        for row in dict.fromkeys((*also, *self._batch.rows)):
            if not row.done:
                self._events.append(fail(row, failure.cause))
        self._batch.clear()
        self._prefix.clear()
        self._unexplained = False
        self._count_failure(failure)

    def _count_failure(self, failure: StepFailed) -> None:
        self._failures += 1
        if self._failures >= FAILED_STEPS_LIMIT:
            raise _Died(f"{self._failures} generation steps failed in a row: {failure}")

    def _fill(self) -> None:
        if not (len(self._prefill) or self._prefill.current):
            return
        running = len(self._batch.rows)
        result = self._prefill.run(self._places - running, busy=running > 0)
        for rows, caches in result.ready:
            self._batch.add(rows, caches)
        for row, error in result.failed:
            logger.warning("the prompt of request %s failed: %s", row.uid, error)
            self._events.append(fail(row, getattr(error, "cause", error)))
        if result.tokens:
            self._counters["prefilled_tokens"] += result.tokens
            self.last_progress = time.monotonic()
        for _, error in result.failed:
            if isinstance(error, StepFailed):
                self._count_failure(error)

    def _cancel(self, row: Row) -> None:
        if row.done:
            return
        row.done = row.failed = True
        self._prefill.remove(row)
        self._events.append(Event(row.uid, finish=Finish("abort")))

    def _hand_over(self) -> None:
        """One call for all of a turn's events."""
        events, self._events = self._events, []
        if not events:
            return
        self._inbox.finish(e.uid for e in events if e.finish is not None or e.error is not None)
        self._deliver(events)

    def _end(self, reason: str) -> None:
        """Give every job that is left its last event; `reason` is empty after a wished stop."""
        told = {e.uid for e in self._events if e.finish is not None or e.error is not None}
        left = [row.uid for row in self._inbox.close(reason or None) if row.uid not in told]
        error = EngineDead(reason) if reason else Unavailable("the server is shutting down")
        events = self._events + [Event(uid, error=error) for uid in left]
        self._events, self._pending = [], None
        if self._start_error is None:
            self._batch.clear()
        self._ready.set()
        try:
            if events:
                self._deliver(events)
        finally:
            if reason:
                logger.error("generation ended: %s", reason)
                self._on_death(reason)
