"""One rank's recent batches, by the publisher's own sequence numbers, for subscribers to read.

Written by the relay's thread, read by the event loop: every method takes the lock for microseconds.
A subscriber has no queue of its own, only a place in here, so memory is bounded by this history
however many of them lag. `epoch` changes when what was told before no longer holds.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from smg_grpc_servicer.core.messages import MAX_MESSAGE_BYTES

DEFAULT_BATCHES = 20_000
"""Twice what vLLM's publisher keeps for replay by default."""
DEFAULT_BYTES = 64 * 1024 * 1024

ENTRY_BYTES = 200
"""What an entry takes beside its data."""
LOAD_BYTES = 4096
"""Room for a load record in a message."""


@dataclass(frozen=True, slots=True)
class Entry:
    """One batch, ready for the wire."""

    sequence: int
    data: bytes
    """A KvEventBatch."""
    digest: int
    """Of the publisher's payload, to tell a repeated batch from another one of that number."""
    first_event: int
    """How many events the relay had seen before this batch's."""
    events: int
    """How many the publisher put in, forwarded or not."""


@dataclass(frozen=True, slots=True)
class View:
    """What a history holds at one moment."""

    epoch: int = 0
    reason: str = ""
    """Why this epoch began."""
    base: int | None = None
    """The first sequence of the record; None before anything is known."""
    first: int | None = None
    """The oldest batch still here; None when there is none."""
    last: int | None = None
    """The newest sequence of the record."""
    held_until: float = 0.0
    """Nothing new is begun before (`monotonic`)."""
    settling: bool = False
    """Batches are being fetched again; `last` will soon move."""

    @property
    def complete(self) -> bool:
        """The history alone tells all the engine ever published."""
        return self.base == 0 and self.first == 0


class History:
    """Bounded by batches and by bytes; the oldest go first."""

    def __init__(self, batches: int = DEFAULT_BATCHES, limit_bytes: int = DEFAULT_BYTES) -> None:
        self.limit_batches = batches
        self.limit_bytes = limit_bytes
        self._lock = threading.Lock()
        self._entries: deque[Entry] = deque()
        self._bytes = 0
        self._epoch = 0
        self._reason = ""
        self._base: int | None = None
        self._last: int | None = None
        self._held_until = 0.0
        self._settling = False

    # Written by the relay.

    def append(self, entry: Entry) -> None:
        """The batch after `last`; the first one begins the record."""
        with self._lock:
            if self._base is None:
                self._base = entry.sequence
            self._last = entry.sequence
            if len(entry.data) + LOAD_BYTES > MAX_MESSAGE_BYTES:
                # No message can carry it, so whoever has not read it gets a snapshot.
                self._drop_all()
                return
            self._entries.append(entry)
            self._bytes += len(entry.data) + ENTRY_BYTES
            while len(self._entries) > self.limit_batches or (
                self._bytes > self.limit_bytes and len(self._entries) > 1
            ):
                self._bytes -= len(self._entries.popleft().data) + ENTRY_BYTES

    def reset(self, reason: str, last: int | None = None, held_until: float = 0.0) -> None:
        """What was told no longer holds; the record begins after `last`, or with what comes."""
        with self._lock:
            self._drop_all()
            self._epoch += 1
            self._reason = reason
            self._base = None if last is None else last + 1
            self._last = last
            self._held_until = held_until

    def settle(self, settling: bool) -> None:
        with self._lock:
            self._settling = settling

    # Read by everybody.

    @property
    def last(self) -> int | None:
        return self._last

    def view(self) -> View:
        with self._lock:
            return View(
                self._epoch,
                self._reason,
                self._base,
                self._entries[0].sequence if self._entries else None,
                self._last,
                self._held_until,
                self._settling,
            )

    def after(self, sequence: int, count: int) -> list[Entry]:
        """Up to `count` batches from `sequence` + 1 on; empty when that one is not here."""
        with self._lock:
            entries = self._entries
            if not entries:
                return []
            start = sequence + 1 - entries[0].sequence
            size = len(entries)
            if not 0 <= start < size:
                return []
            # By index, which a deque finds from its nearer end.
            return [entries[at] for at in range(start, min(start + count, size))]

    def read(self, epoch: int, sequence: int, count: int) -> list[Entry]:
        """As `after`, of that epoch only."""
        with self._lock:
            if epoch != self._epoch:
                return []
        found = self.after(sequence, count)
        return found if epoch == self._epoch else []

    def digest(self, sequence: int) -> int | None:
        """Of the batch with that number, when it is here."""
        found = self.after(sequence - 1, 1)
        return found[0].digest if found else None

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {"history_batches": len(self._entries), "history_bytes": self._bytes}

    def _drop_all(self) -> None:
        self._entries.clear()
        self._bytes = 0
