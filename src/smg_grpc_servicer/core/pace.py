"""How often a stream is written to: at every output while the loop keeps up, rarer while it lags.

What an engine brings in a step wakes one writer for every running stream. `Pace` measures how long
such a round of writers takes. While that is long, waking them again right after it only makes the
next round longer and takes the processor from the engine; so a stream's messages are then a window
apart, and what comes between travels together. The window is zero on an idle loop, follows the
lag, and never holds a first token, an end or an error. Times are `monotonic` seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic

LAG = 0.00025
"""What a round may take before anything is held."""
SHARE = 4
"""Writing gets one part in so many of the loop's time, where a stream's wait allows that,"""
SMALL_SHARE = 16
"""and so many where the engine computes on the processors that write."""
SHORTEST = 0.01
"""A shorter window is not worth its timer."""
LONGEST = 0.02
"""No token is held longer than this, unless told otherwise."""
ROUND = 8
"""Writers woken make a round worth measuring,"""
OFTEN = 0.05
"""or the time since the last one."""


class Pace:
    """One for all streams of a server, on its event loop."""

    __slots__ = (
        "_began",
        "_held",
        "_longest",
        "_measured",
        "_streams",
        "_timer",
        "_woken",
        "share",
        "window",
    )

    def __init__(self, longest: float = LONGEST) -> None:
        self._longest = longest
        self.share = SHARE
        self.window = 0.0
        """How far apart a stream's messages are now."""
        self._held: list[Callable[[], None]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._woken = 0
        self._streams = 0
        self._began: float | None = None
        self._measured = 0.0

    def woke(self, now: float, streams: int) -> None:
        """One of `streams` writers was woken, or has more to write after its message."""
        self._woken += 1
        self._streams = streams
        if self._began is not None or (self._woken < ROUND and now - self._measured < OFTEN):
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:  # no loop, no lag
            return
        self._began = now
        # First behind the writers woken already, then behind those that are woken with them.
        loop.call_soon(loop.call_soon, self._end_of_round)

    def hold(self, release: Callable[[], None], seconds: float) -> None:
        """Call `release` in about `seconds`, together with all that is held then."""
        self._held.append(release)
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, self._release)

    def took(self, seconds: float, part: float = 1.0) -> None:
        """A round took that long; for all streams it would be `part` times that."""
        lag = seconds * max(part, 1.0)
        if lag > LAG:
            self.window = min(self._longest, max(self.share * lag, SHORTEST))
        else:
            self.window = 0.0

    def _end_of_round(self) -> None:
        if self._began is not None:
            self._measured = monotonic()
            self.took(self._measured - self._began, self._streams / self._woken)
        self._began, self._woken = None, 0

    def _release(self) -> None:
        self._timer = None
        held, self._held = self._held, []
        for release in held:
            release()

    def statistics(self) -> dict[str, int]:
        return {"held": len(self._held)}
