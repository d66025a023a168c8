"""The stall rule: an engine that has work and says nothing for too long is not ready.

Silence counts from the later of the last output and the moment there was work again, on the
monotonic clock. No work is never a stall. Pure: the caller brings the time and asks again when
`next_look` says so, so an idle server costs nothing and a busy one a look every `bound` seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

RECOVERY_LOOK = 1.0
"""Seconds between looks while stalled."""


class Progress(Protocol):
    """What the rule looks at; times are `time.monotonic` seconds, None = never or not now."""

    @property
    def in_flight(self) -> int: ...

    @property
    def last_output(self) -> float | None: ...

    @property
    def busy_since(self) -> float | None:
        """Since when the engine has owed an answer to anybody; None while it owes none."""
        ...


class EngineProgress:
    """A request table's progress, with what an engine shows beside its output.

    A long prefill, or an answer that is sent whole, is nothing in the table for minutes.

    :param sign: when the engine last gave one; it counts as output.
    """

    def __init__(self, table: Progress, sign: Callable[[], float | None]) -> None:
        self._table = table
        self._sign = sign

    @property
    def in_flight(self) -> int:
        return self._table.in_flight

    @property
    def busy_since(self) -> float | None:
        return self._table.busy_since

    @property
    def last_output(self) -> float | None:
        return latest(self._table.last_output, self._sign())


def latest(*moments: float | None) -> float | None:
    return max((moment for moment in moments if moment is not None), default=None)


class StallRule:
    """Applies the rule; `bound` in seconds, 0 switches it off."""

    def __init__(self, bound: float) -> None:
        self.bound = bound
        self.stalled = False

    def silence(self, progress: Progress, now: float) -> float | None:
        """Seconds without output while there is work; None when there is none."""
        since = progress.busy_since
        if progress.in_flight <= 0 or since is None:
            return None
        last = progress.last_output
        return max(0.0, now - (since if last is None else max(last, since)))

    def look(self, progress: Progress, now: float) -> bool:
        """Apply the rule now; True when the verdict changed."""
        silence = self.silence(progress, now)
        stalled = self.bound > 0 and silence is not None and silence >= self.bound
        changed = stalled is not self.stalled
        self.stalled = stalled
        return changed

    def next_look(self, progress: Progress, now: float) -> float | None:
        """Seconds until the verdict could change by itself; None = not before new work comes."""
        silence = self.silence(progress, now)
        if self.bound <= 0 or silence is None:
            return None
        return RECOVERY_LOOK if self.stalled else max(self.bound - silence, 0.001)
