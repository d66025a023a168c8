"""One hand-over per stream between an engine and the writer of its answers.

Promises: deltas of a choice come out in order, each once; what piles up while the writer is busy
comes out as one delta; memory is bounded; after the end nothing more comes out. Everything here
runs on the event loop; an engine on another thread brings its deltas over with one
`call_soon_threadsafe` per step.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from time import monotonic

from smg_grpc_servicer.core.errors import Exhausted
from smg_grpc_servicer.core.pace import LONGEST, Pace
from smg_grpc_servicer.core.types import Delta, Finish

MAX_PENDING = 1_000_000
"""Tokens and log-probabilities that may wait in one mailbox (about 70 bytes each)."""
MAX_PENDING_IN_ALL = 4_000_000
"""The same for all mailboxes together; past it the fullest one is given up."""


class Pulse:
    """What all mailboxes of a server share, and what wakes their writers.

    Times are `monotonic` seconds.
    """

    __slots__ = ("_woken", "last_output", "on_overflow", "owed", "owed_since", "pace", "pending")

    def __init__(self, longest_hold: float = LONGEST) -> None:
        self.pace = Pace(longest_hold)
        self.last_output: float | None = None
        """When the engine last produced anything."""
        self.owed = 0
        """Requests the engine was given and has not ended."""
        self.owed_since: float | None = None
        """When those became more than none."""
        self.pending = 0
        """Tokens and log-probabilities that wait in all mailboxes."""
        self.on_overflow: Callable[[], None] = lambda: None
        self._woken: list[Callable[[], None]] = []

    def soon(self, wake: Callable[[], None]) -> None:
        """Call it in the loop's next turn, with all others of this one."""
        if not self._woken:
            asyncio.get_running_loop().call_soon(self._wake_all)
        self._woken.append(wake)

    def _wake_all(self) -> None:
        woken, self._woken = self._woken, []
        for wake in woken:
            wake()


class Mailbox:
    """Coalescing, bounded, ended exactly once.

    A streaming writer is woken by every delta that the pace lets through; any other only by the
    end, so an answer that is sent whole costs one wake-up however many tokens it has.
    """

    __slots__ = (
        "_error",
        "_fresh",
        "_held",
        "_limit",
        "_listener",
        "_open",
        "_owed",
        "_pending",
        "_pulse",
        "_ready",
        "_ready_at",
        "_size",
        "_stream",
        "_waiter",
        "dropped",
        "engine_done",
    )

    def __init__(
        self,
        choices: int = 1,
        *,
        stream: bool,
        limit: int = MAX_PENDING,
        pulse: Pulse | None = None,
    ) -> None:
        self._open = set(range(choices))
        self._fresh = set(self._open)
        """Choices that nothing has come for; their first delta is not held."""
        self._stream = stream
        self._limit = limit
        self._pulse = pulse or Pulse()
        self._pending: dict[int, Delta] = {}
        self._size = 0
        self._owed = False
        self._error: Exception | None = None
        self._waiter: asyncio.Future[None] | None = None
        self._listener: Callable[[], None] | None = None
        self._ready = False
        """The writer may take what waits."""
        self._ready_at = 0.0
        self._held = False
        self.engine_done = False
        """The engine itself ended the request, so there is nothing left to abort there."""
        self.dropped = 0
        """Deltas that came after the end."""

    @property
    def ended(self) -> bool:
        """No choice is open any more, or the stream failed; deltas may still wait."""
        return not self._open or self._error is not None

    @property
    def size(self) -> int:
        """Tokens and log-probabilities that wait here."""
        return self._size

    @property
    def window(self) -> float:
        """Seconds between two messages of a stream now; see `Pace`."""
        return self._pulse.pace.window

    # The engine's side.

    def put(self, delta: Delta) -> None:
        """Hand over a delta; its lists now belong to the mailbox. Ignored after the end."""
        index = delta.index
        self._pulse.last_output = now = monotonic()
        if self._error is not None or index not in self._open:
            self.dropped += 1
            return
        urgent = index in self._fresh
        if urgent:
            self._fresh.discard(index)
        if delta.finish is not None:
            urgent = True
            self._open.discard(index)
            if not self._open:
                self.engine_done = True
                self._settle()
        waiting = self._pending.get(index)
        if waiting is None:
            self._pending[index] = delta
        else:
            _merge(waiting, delta)
        self._grow(len(delta.token_ids) if delta.logprobs is None else _size(delta))
        self._tell(now, urgent=urgent)

    def put_ids(self, index: int, token_ids: Sequence[int]) -> None:
        """`put` of a delta that has nothing but ids, which most are; they are copied."""
        waiting = self._pending.get(index)
        if waiting is None or waiting.finish is not None or self._error is not None:
            self.put(Delta(index, list(token_ids)))
            return
        self._pulse.last_output = now = monotonic()
        waiting.token_ids += token_ids
        self._grow(len(token_ids))
        if not (self._ready or self._held):  # else the writer knows, or will by a timer
            self._tell(now, urgent=False)

    def fail(self, error: Exception) -> None:
        """End the stream with an error; what was handed over before it still comes out first."""
        if not self.ended:
            self._error = error
            self.engine_done = True
            self._settle()
            self._wake()

    # The core's side.

    def owe(self) -> None:
        """The engine is given the request: from now on its silence counts."""
        if not self._owed and not self.ended:
            self._owed = True
            self._pulse.owed += 1
            if self._pulse.owed == 1:
                self._pulse.owed_since = monotonic()

    def close(self) -> None:
        """Nobody reads any more."""
        self._listener = None
        self._drop()
        self._settle()

    def cut(self, error: Exception) -> None:
        """End the stream with an error now; the engine may still be working on it."""
        if not self.ended:
            self._error = error
            self._drop()
            self._settle()
            self._wake()

    def abort(self) -> bool:
        """End every open choice as aborted. False when there was nothing left to end.

        Tokens that still wait are dropped from a stream, so that none follows an acknowledged
        abort; an answer that is sent whole keeps what it has.
        """
        if self.ended:
            return False
        for index in sorted(self._open):
            waiting = self._pending.get(index)
            if waiting is not None and not self._stream:
                waiting.finish = Finish("abort")
                continue
            if waiting is not None:
                self._shrink(_size(waiting))
            self._pending[index] = Delta(index=index, finish=Finish("abort"))
        self._open.clear()
        self._settle()
        self._wake()
        return True

    def take(self) -> Delta | None:
        """What has piled up for one choice, or None when nothing waits or it is held."""
        pending = self._pending
        if not self._ready or not pending:
            return None
        delta = pending.pop(next(iter(pending)))
        self._shrink(len(delta.token_ids) if delta.logprobs is None else _size(delta))
        if not pending and self._open:
            self._ready = False
        return delta

    @property
    def over(self) -> bool:
        """Nothing waits and nothing more will come."""
        return not self._open and not self._pending and self._error is None

    def check(self) -> None:
        """:raises Exception: what `fail` or `cut` was given, once all before it was taken."""
        if self._error is not None and not self._pending:
            raise self._error

    def listen(self, woken: Callable[[], None]) -> None:
        """Call `woken` now, and in the loop's next turn whenever there may be news to take."""
        self._listener = woken
        woken()

    async def wait(self) -> bool:
        """Wait until `take` has something (True) or the stream is over (False).

        :raises Exception: what `fail` or `cut` was given, once everything before it was taken.
        """
        while not (self._ready and self._pending):
            if self._error is not None:
                raise self._error
            if not self._open:
                return False
            self._waiter = asyncio.get_running_loop().create_future()
            try:
                await self._waiter
            finally:
                self._waiter = None
        return True

    def statistics(self) -> dict[str, int]:
        return {"pending": self._size, "open": len(self._open), "dropped": self.dropped}

    def overflow(self) -> None:
        """Give up the stream because too much waits in it."""
        size = self._size
        self._open.clear()
        self._drop()
        self._settle()
        self.engine_done = False
        self._error = Exhausted(
            f"{size} tokens and logprobs wait to be sent, which is too much: "
            "read faster, or ask for fewer logprobs or tokens"
        )
        self._wake()

    def _grow(self, amount: int) -> None:
        """Something more waits, here and in all; it may be too much."""
        pulse = self._pulse
        self._size = size = self._size + amount
        pulse.pending = pending = pulse.pending + amount
        if size > self._limit:
            self.overflow()
        elif pending > MAX_PENDING_IN_ALL:
            pulse.on_overflow()

    def _shrink(self, amount: int) -> None:
        self._size -= amount
        self._pulse.pending -= amount

    def _drop(self) -> None:
        self._pending.clear()
        self._shrink(self._size)

    def _settle(self) -> None:
        """The engine owes nothing for this request any more."""
        if self._owed:
            self._owed = False
            self._pulse.owed -= 1
            if not self._pulse.owed:
                self._pulse.owed_since = None

    def _tell(self, now: float, *, urgent: bool) -> None:
        """The writer hears of what waits: at once, or when the pace allows the next message."""
        if not (self._stream or self.ended):
            return
        pace = self._pulse.pace
        early = 0.0 if urgent else self._ready_at + pace.window - now
        if early <= pace.window / 4:
            self._let_go(now)
        elif not self._held:
            self._held = True
            pace.hold(self._release, early)

    def _release(self) -> None:
        self._held = False
        if self._pending and not self._ready:
            self._let_go(monotonic())

    def _let_go(self, now: float) -> None:
        self._ready_at = now
        self._pulse.pace.woke(now, self._pulse.owed)
        self._wake()

    def _wake(self) -> None:
        if not self._ready and self._listener is not None:
            self._pulse.soon(self._listener)
        self._ready = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _size(delta: Delta) -> int:
    rows = delta.logprobs
    size = len(delta.token_ids)
    if rows is not None:
        size += len(rows.values) + sum(map(len, rows.top_ids)) + sum(map(len, rows.chosen))
    return size


def _merge(older: Delta, newer: Delta) -> None:
    older.token_ids += newer.token_ids
    if newer.logprobs is not None:
        if older.logprobs is None:
            older.logprobs = newer.logprobs
        else:
            older.logprobs.extend(newer.logprobs)
    older.finish = newer.finish
    if newer.prompt_tokens is not None:
        older.prompt_tokens = newer.prompt_tokens
    if newer.cached_tokens is not None:
        older.cached_tokens = newer.cached_tokens
    if newer.reasoning_tokens is not None:
        older.reasoning_tokens = newer.reasoning_tokens
    if newer.prompt_logprobs is not None:
        older.prompt_logprobs = newer.prompt_logprobs
    if newer.weight_version is not None:
        older.weight_version = newer.weight_version
