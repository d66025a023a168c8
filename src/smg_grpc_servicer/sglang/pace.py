"""How soon outputs are read again: at once while the event loop keeps up, later while it lags.

Each reading makes a message for every running stream, and a message costs far more than its tokens.
When the loop needs long to write one reading out, more of them only make it later; what stays
unread meanwhile is merged into one message per stream. The pause follows the lag and is zero on a
loop that keeps up. Seconds.
"""

from __future__ import annotations

LAG = 0.001
"""What the loop may take over a reading before the next one waits."""
LONGEST = 0.02
"""No output is left unread for longer."""


class Pace:
    """Decisions only."""

    __slots__ = ("window",)

    def __init__(self) -> None:
        self.window = 0.0
        """From one reading to the next."""

    def pause(self, lag: float) -> float:
        """How long to leave the socket alone, `lag` after a reading began."""
        self.window = min(LONGEST, max(2 * lag, self.window / 2)) if lag > LAG else self.window / 2
        if self.window < LAG:
            self.window = 0.0
        return max(self.window - lag, 0.0)
