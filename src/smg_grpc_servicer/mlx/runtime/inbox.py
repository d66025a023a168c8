"""The door between the event loop and the generation thread: jobs, cancels, the stop wish.

Every method may be called from any thread. Decisions are made under one lock that is never held
while anything runs; the generation thread sleeps on its condition and is never polled.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable

from smg_grpc_servicer.core.errors import (
    AlreadyExists,
    Exhausted,
    InvalidArgument,
    Unavailable,
)
from smg_grpc_servicer.mlx.runtime.job import Job, Row, make_row


class Inbox:
    def __init__(self, places: int, max_queued: int) -> None:
        """`places` rows generate at once, `max_queued` more may wait for one."""
        self._condition = threading.Condition()
        self.places = places
        self._max_queued = max_queued
        self._live: dict[str, Row] = {}
        self._fresh: list[Row] = []
        self._cancelled: list[Row] = []
        self._arrivals = 0
        self._stopping = False
        self._closed: Unavailable | None = None

    def submit(self, job: Job) -> None:
        """Raises Exhausted when the queue is full, Unavailable when nobody will take the job."""
        if not job.prompt:
            raise InvalidArgument("input", "the prompt has no tokens")
        if job.max_tokens < 1:
            raise InvalidArgument("max_tokens", f"must be at least 1, got {job.max_tokens}")
        with self._condition:
            if self._closed is not None:
                raise self._closed
            if job.uid in self._live:
                raise AlreadyExists(f"request {job.uid} is in flight")
            # A cancelled job's place is free at once, though it lives until its last event.
            if len(self._live) - len(self._cancelled) >= self.places + self._max_queued:
                raise Exhausted(
                    f"{self._max_queued} requests are waiting, the most allowed"
                    " (--max-queued-requests); try again later"
                )
            row = make_row(job, self._arrivals)
            self._arrivals += 1
            self._live[job.uid] = row
            self._fresh.append(row)
            self._condition.notify()

    def cancel(self, uid: str) -> None:
        """Ask for an end; a job that is not in flight has ended already."""
        with self._condition:
            row = self._live.get(uid)
            if row is not None and row not in self._cancelled:
                self._cancelled.append(row)
                self._condition.notify()

    def stop(self) -> None:
        with self._condition:
            self._stopping = True
            if self._closed is None:
                self._closed = Unavailable("the server is shutting down")
            self._condition.notify()

    def take(self, *, wait: bool) -> tuple[list[Row], list[Row], bool]:
        """New rows, cancelled rows, and whether to stop; sleeps until there is any if `wait`."""
        with self._condition:
            while wait and not (self._fresh or self._cancelled or self._stopping):
                self._condition.wait()
            fresh, self._fresh = self._fresh, []
            cancelled, self._cancelled = self._cancelled, []
            return fresh, cancelled, self._stopping

    def finish(self, uids: Iterable[str]) -> None:
        """These jobs got their last event."""
        with self._condition:
            for uid in uids:
                self._live.pop(uid, None)

    def close(self, error: Unavailable) -> list[Row]:
        """Refuse jobs with `error` from now on; the jobs that still wait for their last event."""
        with self._condition:
            self._closed = error
            left = list(self._live.values())
            self._live.clear()
            self._fresh, self._cancelled = [], []
            return left

    @property
    def in_flight(self) -> int:
        with self._condition:
            return len(self._live)

    @property
    def open(self) -> bool:
        with self._condition:
            return self._closed is None

    def statistics(self) -> dict[str, int]:
        with self._condition:
            return {
                "in_flight": len(self._live),
                "queued": max(0, len(self._live) - self.places),
                "cancelling": len(self._cancelled),
            }
