"""One subscriber's place in each rank's history and what it is to be sent next. Decisions only.

A cursor is the last sequence number the subscriber has seen. One that fell behind the history gets
a snapshot of the live blocks; one that falls behind again before it has caught up ends with
DATA_LOSS. One that holds nothing of a lost epoch has nothing to be told and goes on with the next.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from smg_grpc_servicer.kv_events.history import View


@dataclass(frozen=True, slots=True)
class Wait:
    """Nothing to send; look again when the history changes, at the latest at `until`."""

    until: float | None = None


@dataclass(frozen=True, slots=True)
class Send:
    """The batches after this sequence, from the history."""

    after: int


@dataclass(frozen=True, slots=True)
class Resync:
    """A snapshot of the live blocks, which replaces what the subscriber knows of the rank."""


@dataclass(frozen=True, slots=True)
class Lost:
    """What the subscriber holds can no longer be brought up to date."""

    reason: str


Step = Wait | Send | Resync | Lost


class Resume(Enum):
    """What a cursor that a subscriber comes with is worth."""

    READY = "the next batch is here or still to come"
    SETTLING = "the relay may get to it"
    OLDER = "only a replay could have what follows"


def resume(view: View, cursor: int) -> Resume:
    """Judge a cursor that is not zero."""
    if view.last is None or cursor > view.last:
        return Resume.SETTLING
    if cursor == view.last or (view.first is not None and cursor >= view.first - 1):
        return Resume.READY
    return Resume.OLDER


class Place:
    """Where a subscriber is in one rank."""

    __slots__ = ("_lagged", "at", "epoch", "holds", "named")

    def __init__(self, *, named: bool = False) -> None:
        self.at: int | None = None
        """The last sequence it was sent; None until something was begun."""
        self.epoch = 0
        self.holds = False
        """It was sent blocks or batches of this epoch."""
        self.named = named
        """It may know numbers of this rank from before, so that lower ones would look stale."""
        self._lagged = False

    @classmethod
    def resumed(cls, view: View, cursor: int) -> Place:
        place = cls()
        place.begin(view.epoch, cursor, holds=True)
        return place

    def begin(self, epoch: int, at: int, *, holds: bool) -> None:
        """It was sent the state at `at`."""
        self.epoch, self.at = epoch, at
        self.holds = self.holds or holds
        self.named = True

    def sent(self, epoch: int, sequence: int) -> None:
        """It was sent a batch of the history."""
        self.epoch, self.at = epoch, sequence
        self.holds = self.named = True

    def next(self, view: View, now: float) -> Step:
        """What to do; `now` by the relay's clock."""
        if self.at is not None and view.epoch != self.epoch:
            if self.holds:
                return Lost(view.reason)
            self.at = None
        if self.at is None:
            return self._first(view, now)
        if view.last is None or self.at >= view.last:
            self._lagged = False
            return Wait()
        if view.first is not None and self.at >= view.first - 1:
            return Send(self.at)
        if self._lagged:
            return Lost(f"too slow: batches after {self.at} are gone, for the second time in a row")
        self._lagged = True
        return Resync()

    def _first(self, view: View, now: float) -> Step:
        self._lagged = False
        if view.last is None:
            return Wait()
        if now < view.held_until:
            return Wait(view.held_until)
        if view.complete and not self.named:
            return Send(-1)
        # While batches are fetched again, a snapshot would be old before it is sent.
        return Wait() if view.settling else Resync()

    def lag(self, view: View) -> int:
        """Batches it has yet to be sent."""
        return 0 if self.at is None or view.last is None else max(view.last - self.at, 0)
