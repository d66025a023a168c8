"""What each arriving batch of one rank means: next, repeated, after a gap, of another publisher.

Decisions only: the relay's thread feeds it and does what it asks. A replay always begins with the
last known batch, whose payload must be the one we know: sequence numbers alone do not tell a gap
from a publisher that was restarted and is already past our place. What cannot be verified counts
as a restart, what cannot be had again as a loss; both begin a new epoch of the history, and every
subscriber that holds something of the old one is told DATA_LOSS.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from smg_grpc_servicer.kv_events.blocks import Blocks
from smg_grpc_servicer.kv_events.decode import Decoder, Undecodable
from smg_grpc_servicer.kv_events.hash_check import HashCheck
from smg_grpc_servicer.kv_events.history import Entry, History
from smg_grpc_servicer.kv_events.normalize import REASONS, Normalizer

log = logging.getLogger(__name__)

COUNTERS = (
    "batches",
    "duplicates",
    "gaps",
    "losses",
    "replays",
    "replay_failures",
    "restarts",
    "undecodable",
)

Live = tuple[int, bytes]
"""Sequence number and payload."""


@dataclass(frozen=True, slots=True)
class Ask:
    """Please replay from `start` on; tell `replayed` and, always, `replay_ended`."""

    start: int


class LossPace:
    """How long a rank that keeps losing events holds back its state (`monotonic` seconds).

    The gateway resubscribes without any delay after DATA_LOSS, so a publisher that fails with
    every batch would have it clear and rebuild its index as fast as both can.
    """

    QUIET = 10.0
    LONGEST = 30.0

    def __init__(self) -> None:
        self._strikes = 0
        self._until = float("-inf")

    @property
    def is_news(self) -> bool:
        """The 1st, 2nd, 4th, 8th … loss in a row: a publisher that fails always fills no log."""
        return not self._strikes & (self._strikes - 1)

    def strike(self, now: float) -> float:
        """Another loss; until when to hold. The first one in a while costs nothing."""
        if now > self._until + self.QUIET:
            self._strikes = 0
        self._strikes += 1
        hold = 0.0 if self._strikes == 1 else min(2.0 ** (self._strikes - 2), self.LONGEST)
        self._until = now + hold
        return self._until


class _Asked:
    """A replay in progress."""

    __slots__ = ("confirmed", "first", "hole", "other", "taken")

    def __init__(self, *, first: bool) -> None:
        self.first = first
        """Nothing was known before it."""
        self.confirmed = first
        """Who answers is the publisher we know, or we know none."""
        self.other = False
        self.hole = False
        self.taken = 0


class RankRecord:
    """One rank's record: its history, its live blocks, its place in the publisher's numbers."""

    def __init__(
        self,
        rank: int,
        history: History,
        *,
        can_replay: bool,
        check: HashCheck | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.rank = rank
        self.history = history
        self.can_replay = can_replay
        self.blocks = Blocks()
        self.normalizer = Normalizer(rank, self.blocks, check)
        self.counts: Counter[str] = Counter()
        self._decoder = Decoder()
        self._pace = LossPace()
        self._clock = clock
        self._digest: int | None = None
        """Of the payload of `history.last`."""
        self._suspect = False
        """The connection was lost: who speaks next may be another process."""
        self._asked: _Asked | None = None
        self._pending: Live | None = None
        """The live batch that waits for what comes before it."""

    @property
    def asking(self) -> bool:
        """A replay is on; live batches wait where they are."""
        return self._asked is not None

    # What the relay tells.

    def live(self, sequence: int, payload: bytes) -> Ask | None:
        """A batch of the live stream; not while `asking`."""
        last = self.history.last
        if last is None:
            if sequence and self.can_replay:
                return self._ask((sequence, payload))
            return self._take(sequence, payload, may_ask=self.can_replay)
        if self._suspect or sequence <= last:
            known = None if self._suspect else self.history.digest(sequence)
            if known is not None and known == hash(payload):
                self.counts["duplicates"] += 1
                return None
            if known is None and self.can_replay:
                return self._ask((sequence, payload))
            self._restart(
                "the connection was lost"
                if self._suspect
                else f"batch {sequence} came again with other contents"
            )
            return self.live(sequence, payload)
        if sequence > last + 1:
            self.counts["gaps"] += 1
            if self.can_replay:
                return self._ask((sequence, payload))
            self._lose(sequence - 1, f"batches {last + 1} to {sequence - 1} never arrived")
        return self._take(sequence, payload, may_ask=self.can_replay)

    def connected(self) -> Ask | None:
        """The publisher can be heard: what did it say before, and is it the one we know?"""
        if self.asking:
            return None
        if self.can_replay:
            return self._ask(None)
        if self._suspect:
            self._restart("the connection was lost and there is no replay to tell what was missed")
        return None

    def disconnected(self) -> None:
        """After all that had arrived by then was told."""
        self._suspect = self.history.last is not None

    def probe(self) -> Ask | None:
        """Look for batches at the end of a burst that never arrived; nothing else would tell."""
        if self.can_replay and not self.asking and self.history.last is not None:
            return self._ask(None)
        return None

    def replayed(self, sequence: int, payload: bytes) -> bool:
        """One batch of the replay; False when no more of it is wanted."""
        asked, last = self._asked, self.history.last
        assert asked is not None
        if last is not None and not asked.confirmed:
            if sequence < last:
                return True
            if sequence == last:
                asked.other = hash(payload) != self._digest
                if not asked.other:
                    asked.confirmed, self._suspect = True, False
                return not asked.other
            asked.confirmed, self._suspect = True, False
            self._lose(sequence - 1, f"the publisher no longer has batch {last}")
        elif last is not None:
            if sequence <= last:
                return True
            if sequence > last + 1:
                asked.hole = True
                return False
        asked.taken += 1
        self._take(sequence, payload, may_ask=False)
        return True

    def replay_ended(self, complete: bool) -> Ask | None:
        """The end marker came, or (not complete) it did not in time."""
        asked, pending = self._asked, self._pending
        assert asked is not None
        self._asked = self._pending = None
        self.counts["replay_failures"] += not complete
        if asked.other or (complete and not asked.confirmed and not asked.hole):
            self._restart("the publisher was restarted")
            return self._ask(pending)
        if asked.hole or not complete:
            if asked.taken:
                return self._ask(pending)
            self._without_replay(pending)
            return None
        self.history.settle(False)
        self._settle(pending, asked)
        return None

    # What follows from it.

    def _ask(self, pending: Live | None) -> Ask:
        last = self.history.last
        self._asked = _Asked(first=last is None)
        self._pending = pending
        self.history.settle(True)
        self.counts["replays"] += 1
        return Ask(0 if last is None else last)

    def _settle(self, pending: Live | None, asked: _Asked) -> None:
        """After a whole replay: what is left of the batch that caused it."""
        last = self.history.last
        if pending is None or (last is not None and pending[0] <= last):
            return
        if last is not None and pending[0] > last + 1:
            if asked.first:
                return  # The publisher we just met never sent it, so an earlier one did.
            self._lose(pending[0] - 1, f"the replay ended at batch {last}, before {pending[0]}")
        self._take(*pending, may_ask=False)

    def _without_replay(self, pending: Live | None) -> None:
        self.history.settle(False)
        if pending is None:
            return
        last, sequence = self.history.last, pending[0]
        if last is not None:
            if self._suspect or sequence <= last:
                self._restart("the publisher may have been restarted and did not replay")
            elif sequence > last + 1:
                missing = f"batches {last + 1} to {sequence - 1}"
                self._lose(sequence - 1, f"{missing} never arrived and were not replayed")
        self._take(*pending, may_ask=False)

    def _take(self, sequence: int, payload: bytes, *, may_ask: bool) -> Ask | None:
        """The next batch, whole."""
        try:
            batch = self._decoder.decode(payload)
        except Undecodable as error:
            self.counts["undecodable"] += 1
            if may_ask:
                return self._ask((sequence, payload))
            self._lose(sequence, f"batch {sequence} cannot be decoded: {error}")
            self._digest = hash(payload)
            return None
        normalizer = self.normalizer
        before = normalizer.inputs
        data = normalizer.batch(sequence, batch)
        self._digest = hash(payload)
        self.counts["batches"] += 1
        self.history.append(Entry(sequence, data, self._digest, before, normalizer.inputs - before))
        return None

    def _restart(self, reason: str) -> None:
        self.counts["restarts"] += 1
        self._begin(reason, None)

    def _lose(self, last: int, reason: str) -> None:
        self.counts["losses"] += 1
        self._begin(reason, last)

    def _begin(self, reason: str, last: int | None) -> None:
        """A new epoch, with nothing known of what the publisher said up to `last`."""
        held_until = self._pace.strike(self._clock())
        level = logging.WARNING if self._pace.is_news else logging.DEBUG
        log.log(level, "KV events of rank %d begin anew: %s", self.rank, reason)
        self.blocks.clear()
        self.normalizer.forget()
        self._digest, self._suspect = None, False
        self.history.reset(reason, last, held_until)

    def statistics(self) -> dict[str, int]:
        return {
            **self.history.statistics(),
            **self.blocks.statistics(),
            "replaying": int(self.asking),
        }

    def totals(self) -> dict[str, int]:
        """Counters since the start, those that are zero as well."""
        counts, dropped = self.counts, self.normalizer.dropped
        return {
            **{name: counts[name] for name in COUNTERS},
            **{f"dropped_{reason}": dropped[reason] for reason in REASONS},
            "forwarded": self.normalizer.forwarded,
        }
