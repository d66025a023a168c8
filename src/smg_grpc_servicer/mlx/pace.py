"""How often steps go over to the event loop: at once while it keeps up, rarer while it lags.

Each hand-over makes a message for every running stream. When the loop is late to take one, more of
them only make it later and take the processor from the model; so tokens are then held and sent
together. The window follows the lag, is zero on an idle loop, and never holds a first token, an
end or an error. Times are `monotonic` seconds.
"""

from __future__ import annotations

LAG = 0.001
"""What the loop may take to answer before anything is held."""
LONGEST = 0.02
"""No token is held longer than this and one step."""


class Pace:
    """Decisions only; `due` on the generation thread, `taken` on the loop (a float each way)."""

    __slots__ = ("_since", "window")

    def __init__(self) -> None:
        self.window = 0.0
        self._since: float | None = None

    def due(self, now: float, *, urgent: bool) -> bool:
        """Whether what is held goes over now; asked once for every step that brought something."""
        if self._since is None:
            self._since = now
        if not urgent and now - self._since < self.window:
            return False
        self._since = None
        return True

    def taken(self, lag: float) -> None:
        """The loop took a hand-over `lag` seconds after it was made."""
        self.window = min(LONGEST, max(2 * lag, self.window / 2)) if lag > LAG else self.window / 2
        if self.window < LAG:
            self.window = 0.0
