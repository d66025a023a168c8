"""The requests in flight: ids, choices, duplicates, abort. Decisions only, no I/O.

A request is here from its admission until its one exit; `statistics()` is all zeros when nothing
runs. Ids are compared whole, so `req-1` never touches `req-10`.
"""

from __future__ import annotations

from enum import Enum
from time import monotonic

from smg_grpc_servicer.core.errors import AlreadyExists, InvalidArgument
from smg_grpc_servicer.core.mailbox import Mailbox, Pulse
from smg_grpc_servicer.core.pace import LONGEST, SMALL_SHARE

MAX_ID = 512
"""Characters of a request id; the gateway's have about 70."""


class Phase(Enum):
    """How far a request has come at the engine."""

    ADMITTED = "admitted"
    SUBMITTING = "submitting"
    RUNNING = "running"
    OVER = "over"


class Ticket:
    """One admitted request: its id, its mailbox, and whether the engine still works on it."""

    __slots__ = ("admitted_at", "mailbox", "phase", "request_id", "stream")

    def __init__(self, request_id: str, mailbox: Mailbox, *, stream: bool) -> None:
        self.request_id = request_id
        self.mailbox = mailbox
        self.stream = stream
        self.phase = Phase.ADMITTED
        self.admitted_at = monotonic()

    def must_abort(self) -> bool:
        """Whether the engine is to be told to stop; says yes at most once.

        While the request is being submitted the engine may not know the id yet, so the answer
        waits for the exit of the one who submits (`leaving`).
        """
        if self.phase is not Phase.RUNNING:
            return False
        self.phase = Phase.OVER
        return not self.mailbox.engine_done

    def leaving(self) -> bool:
        """The exit path's question: like `must_abort`, also right after a submit was cut off."""
        if self.phase is Phase.SUBMITTING:
            self.phase = Phase.RUNNING
        return self.must_abort()


class RequestTable:
    """All requests in flight, by their caller's id."""

    def __init__(self, longest_hold: float = LONGEST) -> None:
        """`longest_hold`: seconds a token may wait for the next while the event loop lags."""
        self._tickets: dict[str, Ticket] = {}
        self._pulse = Pulse(longest_hold)
        self._pulse.on_overflow = self._give_up_fullest
        self._streams = 0
        self._streaming_since: float | None = None

    def write_less(self) -> None:
        """The engine computes on the processors that write: its time is dearer than a wait."""
        self._pulse.pace.share = SMALL_SHARE

    @property
    def in_flight(self) -> int:
        return len(self._tickets)

    @property
    def last_output(self) -> float | None:
        """When any engine output last arrived (`monotonic` seconds)."""
        return self._pulse.last_output

    @property
    def busy_since(self) -> float | None:
        """Since when the engine has owed something; None while it owes nothing.

        A request that is still being prepared, or whose reader is slow, is in flight but owed
        nothing: its silence is not the engine's.
        """
        return self._pulse.owed_since

    @property
    def streaming_since(self) -> float | None:
        """When the first of the streamed requests in flight began; None while there is none."""
        return self._streaming_since

    def admit(self, request_id: str, choices: int = 1, *, stream: bool) -> Ticket:
        """Register a request.

        :raises InvalidArgument: no id.
        :raises AlreadyExists: a request with this id is in flight; it is not touched.
        """
        if not request_id:
            raise InvalidArgument("request_id", "must not be empty")
        if len(request_id) > MAX_ID:
            raise InvalidArgument(
                "request_id", f"must have at most {MAX_ID} characters, got {len(request_id)}"
            )
        if request_id in self._tickets:
            raise AlreadyExists(f"request_id: {request_id!r} is already in flight")
        ticket = Ticket(
            request_id, Mailbox(choices, stream=stream, pulse=self._pulse), stream=stream
        )
        self._tickets[request_id] = ticket
        self._streams += stream
        if stream and self._streaming_since is None:
            self._streaming_since = ticket.admitted_at
        return ticket

    def release(self, ticket: Ticket) -> None:
        """The request's exit. Only its own entry goes, never a later one under the same id."""
        if self._tickets.get(ticket.request_id) is ticket:
            del self._tickets[ticket.request_id]
            self._streams -= ticket.stream
            if not self._streams:
                self._streaming_since = None
        ticket.mailbox.close()

    def abort(self, request_id: str) -> Ticket | None:
        """End a request's stream as aborted; its ticket, or None when there is nothing to end."""
        ticket = self._tickets.get(request_id)
        if ticket is None or not ticket.mailbox.abort():
            return None
        return ticket

    def fail_all(self, error: Exception) -> None:
        """The engine is gone: every stream ends with `error` after what it already had."""
        for ticket in self._tickets.values():
            ticket.mailbox.fail(error)

    def cut_all(self, error: Exception) -> None:
        """This server stops: every stream ends with `error` now, and the engine is told."""
        for ticket in self._tickets.values():
            ticket.mailbox.cut(error)

    def _give_up_fullest(self) -> None:
        """Too much waits in all mailboxes together: who holds most pays."""
        fullest = max(self._tickets.values(), key=lambda ticket: ticket.mailbox.size, default=None)
        if fullest is not None:
            fullest.mailbox.overflow()

    def statistics(self) -> dict[str, int]:
        boxes = [ticket.mailbox.statistics() for ticket in self._tickets.values()]
        return {
            "in_flight": len(self._tickets),
            "pending": sum(box["pending"] for box in boxes),
            "open_choices": sum(box["open"] for box in boxes),
            "owed": self._pulse.owed,
        }
