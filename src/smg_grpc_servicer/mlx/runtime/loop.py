"""`GenerationLoop`: the one thread that touches mlx, seen from outside.

Times are monotonic seconds. Every accepted job gets exactly one last event, also when the thread
dies or is stopped; `deliver` and `on_death` are called on the generation thread.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from smg_grpc_servicer.core.errors import EngineDead, Unavailable
from smg_grpc_servicer.mlx.runtime.inbox import Inbox
from smg_grpc_servicer.mlx.runtime.job import Event, Job, describe
from smg_grpc_servicer.mlx.runtime.prefill import Budget
from smg_grpc_servicer.mlx.runtime.worker import Deliver, Died, Limits, Worker

logger = logging.getLogger(__name__)


class GenerationLoop:
    """Runs jobs on a model whose arrays are evaluated; methods may be called from any thread."""

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
        """`deliver` gets all of a step's events in one call; budgets are prompt tokens a step."""
        self._model = model
        self._deliver = deliver
        self._on_death = on_death
        self._limits = Limits(
            places=completion_batch_size,
            budget=Budget(prefill_budget, idle_prefill_budget, prefill_batch_size),
            prompt_cache_bytes=prompt_cache_bytes,
        )
        self._inbox = Inbox(completion_batch_size, max_queued)
        self._thread = threading.Thread(target=self._run, name="mlx-generation", daemon=True)
        self._ready = threading.Event()
        self._created = time.monotonic()
        self._worker: Worker | None = None
        self._start_error: Exception | None = None

    def start(self) -> None:
        self._thread.start()

    def wait_ready(self, timeout: float | None = None) -> bool:
        """Whether jobs run; raises what kept the thread from starting."""
        ready = self._ready.wait(timeout)
        if self._start_error is not None:
            raise self._start_error
        return ready and self.alive

    def submit(self, job: Job) -> None:
        """Accept a job. Raises Exhausted past the queue bound, Unavailable when stopped or dead."""
        self._inbox.submit(job)

    def cancel(self, uid: str) -> None:
        """End a job with `Finish("abort")` at the next turn; nothing if it has ended."""
        self._inbox.cancel(uid)

    def stop(self, timeout: float | None = None) -> bool:
        """End the thread; jobs that still run get Unavailable. False: it did not end in time."""
        self._inbox.stop()
        if self._thread.ident is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def alive(self) -> bool:
        return self._thread.is_alive() and self._inbox.open

    @property
    def in_flight(self) -> int:
        return self._inbox.in_flight

    @property
    def last_progress(self) -> float:
        """When a step or a prompt chunk last came to an end."""
        return self._created if self._worker is None else self._worker.last_progress

    def statistics(self) -> dict[str, int]:
        """What is held right now; all zero when nothing is in flight."""
        held = self._inbox.statistics()
        return held if self._worker is None else held | self._worker.statistics()

    def counters(self) -> dict[str, int]:
        """What happened since the start (`…_total`), and the prefix cache's size."""
        worker = self._worker
        if worker is None:
            return {}
        totals = {f"{name}_total": count for name, count in worker.counters.items()}
        return totals | worker.prefix.counters()

    def _run(self) -> None:
        reason = "the generation thread was ended from outside"
        try:
            # mlx streams belong to the thread that made them.
            with mx.stream(mx.new_stream(mx.default_device())):
                worker = self._prepare()
                self._ready.set()
                while worker.turn():
                    pass
            reason = ""
        except Died as died:
            reason = str(died)
        except Exception as error:
            logger.exception("the generation thread failed")
            reason = f"the generation thread failed: {describe(error)}"
        finally:
            self._end(reason)

    def _prepare(self) -> Worker:
        try:
            self._worker = Worker(self._model, self._limits, self._inbox, self._deliver)
        except Exception as error:
            self._start_error = error
            raise Died(f"the model does not run: {describe(error)}") from error
        return self._worker

    def _end(self, reason: str) -> None:
        """Give every job that is left its last event; `reason` is empty after a wished stop."""
        events = [] if self._worker is None else self._worker.undelivered()
        told = {e.uid for e in events if e.last}
        error = (
            EngineDead(f"the engine died: {reason}")
            if reason
            else Unavailable("the server is shutting down")
        )
        left = self._inbox.close(error)
        events += [Event(row.uid, error=error) for row in left if row.uid not in told]
        if self._worker is not None:
            self._worker.release()
        self._ready.set()
        try:
            if events:
                self._deliver(events)
        except Exception:
            # The receiver may be what died; the death must be told all the same.
            logger.exception("the last events of %d requests were not taken", len(events))
        if reason:
            logger.error("generation ended: %s", reason)
            self._on_death(reason)
