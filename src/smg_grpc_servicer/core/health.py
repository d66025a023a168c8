"""One answer to "is it alive, is it ready, and why not", and `grpc.health.v1` on top of it.

Liveness (the name `""`) is false only when the engine is dead or the server has stopped: what a
restart cures. Readiness (the engine's service name) is false also while loading, warming,
draining and stalled: what waiting cures. Everything here belongs to the event loop's thread; an
engine's thread comes in with `call_soon_threadsafe`.
The protocol's rules: https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_grpc_servicer.core.errors import EngineDead, NotFound, Unavailable
from smg_grpc_servicer.core.stall import Progress, StallRule
from smg_grpc_servicer.core.status import MAX_TEXT, refuse

log = logging.getLogger(__name__)

STALL_SECONDS = 30.0


class State(Enum):
    """Where a server is in its life; it only moves forward."""

    LOADING = "loading"
    WARMING = "warming up"
    SERVING = "serving"
    DRAINING = "draining"
    STOPPED = "stopped"

    @property
    def order(self) -> int:
        return list(State).index(self)


class StatusBoard:
    """State, engine death and the stall rule in one place.

    `progress` is looked at, never told: a token costs nothing here. Whoever keeps the requests
    calls `request_arrived` after adding one and `request_left` after removing one.
    """

    def __init__(
        self,
        progress: Progress | None = None,
        *,
        stall_seconds: float = STALL_SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.progress = progress
        self.state = State.LOADING
        self.death: str | None = None
        """Why the engine is dead, or None."""
        self.unsent = 0
        """Requests that are over but for their last message, which gRPC may still be sending."""
        self._rule = StallRule(stall_seconds)
        self._clock = clock
        self._subscribers: set[Callable[[], None]] = set()
        self._timer: asyncio.TimerHandle | None = None

    # What others ask.

    @property
    def alive(self) -> bool:
        return self.death is None and self.state is not State.STOPPED

    @property
    def stalled(self) -> bool:
        return self._rule.stalled

    @property
    def ready(self) -> bool:
        return self.alive and self.state is State.SERVING and not self._rule.stalled

    @property
    def accepting(self) -> bool:
        """Whether new requests are admitted. A stall may end by itself, so it refuses nothing."""
        return self.death is None and self.state is State.SERVING

    @property
    def condition(self) -> str:
        """One word or two: `dead`, `stalled`, or the state."""
        if self.death is not None:
            return "dead"
        return "stalled" if self.alive and self._rule.stalled else self.state.value

    @property
    def in_flight(self) -> int:
        return self.unsent + (self.progress.in_flight if self.progress is not None else 0)

    @property
    def reason(self) -> str:
        """Why it is not ready, or `serving`."""
        if self.death is not None:
            return f"engine dead: {self.death}"
        if self.state is State.SERVING and self._rule.stalled:
            return self._stall()
        return self.state.value

    def require_accepting(self) -> None:
        """:raises Unavailable: new work is refused, and why (`EngineDead` when that is why)."""
        if self.death is not None:
            raise EngineDead(self.reason)
        if not self.accepting:
            raise Unavailable(f"the server is {self.state.value}")

    # What changes it.

    def warming(self) -> None:
        self._move(State.WARMING)

    def serving(self) -> None:
        self._move(State.SERVING)

    def draining(self) -> None:
        self._move(State.DRAINING)

    def stopped(self) -> None:
        self._move(State.STOPPED)
        self._disarm()

    def dead(self, reason: str) -> None:
        """The engine is gone for good; the first reason stays. Not news once stopped."""
        if self.death is not None or self.state is State.STOPPED:
            return
        self.death = reason or "no reason given"
        self._disarm()
        log.error("engine dead: %s", self.death)
        self._tell()

    def request_arrived(self) -> None:
        """There is work: watch for a stall, if nobody does yet."""
        if self._timer is None:
            self._arm()

    def request_left(self) -> None:
        """Let a drain see that it may be over."""
        if self.state is State.DRAINING and self.in_flight == 0:
            self._tell()

    def request_sent(self, _: Any = None) -> None:
        """One of the `unsent` is sent, or will never be."""
        self.unsent -= 1
        self.request_left()

    def refresh(self) -> None:
        """Apply the stall rule now instead of at the next timer."""
        if self.progress is None or self.death is not None or self.state is State.STOPPED:
            return
        if self._rule.look(self.progress, self._clock()):
            if self._rule.stalled:
                log.warning("%s", self._stall())
            else:
                log.info("the engine produces output again")
            self._tell()
        if self._timer is None:
            self._arm()

    def subscribe(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after every change; it must not block. Returns how to end that."""
        self._subscribers.add(callback)
        return lambda: self._subscribers.discard(callback)

    def statistics(self) -> dict[str, int]:
        return {"subscribers": len(self._subscribers), "timers": int(self._timer is not None)}

    def _stall(self) -> str:
        return (
            f"stalled: no output for more than {self._rule.bound:g} s "
            f"with {self.in_flight} requests in flight"
        )

    def _move(self, state: State) -> None:
        # Never back: a late "warm-up done" must not undo a drain.
        if state.order <= self.state.order:
            return
        self.state = state
        log.info("state: %s", state.value)
        self._tell()

    def _tell(self) -> None:
        for callback in tuple(self._subscribers):
            callback()

    def _arm(self) -> None:
        if self.progress is None:
            return
        seconds = self._rule.next_look(self.progress, self._clock())
        if seconds is None:
            return
        try:
            loop = asyncio.get_running_loop()
        except RuntimeError:
            return  # Decided without a loop; whoever has none calls `refresh`.
        self._timer = loop.call_later(seconds, self._look)

    def _disarm(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        self._timer = None
        self.refresh()


class HealthServicer(health_pb2_grpc.HealthServicer):
    """`grpc.health.v1.Health` over a board: `""` is liveness, `names` are readiness."""

    def __init__(self, board: StatusBoard, names: Sequence[str] = ()) -> None:
        self._board = board
        self._names = list(names)
        self._watchers: set[asyncio.Event] = set()

    def add(self, *names: str) -> None:
        """Make more service names known; a Watch that waits for one hears of it."""
        self._names += [name for name in names if name not in self._names]
        for wake in tuple(self._watchers):
            wake.set()

    def status(self, name: str) -> health_pb2.HealthCheckResponse.ServingStatus:
        """The status of a name now."""
        statuses = health_pb2.HealthCheckResponse
        if name == "":
            up = self._board.alive
        elif name in self._names:
            up = self._board.ready
        else:
            return statuses.SERVICE_UNKNOWN
        return statuses.SERVING if up else statuses.NOT_SERVING

    async def Check(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthCheckResponse:
        self._board.refresh()
        status = self.status(request.service)
        if status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN:
            got = request.service[:MAX_TEXT]
            error = NotFound(f"service: got {got!r}, allowed: {self._known()}")
            await refuse(context, error)
        return health_pb2.HealthCheckResponse(status=status)

    async def Watch(self, request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        self._board.refresh()
        wake = asyncio.Event()
        unsubscribe = self._board.subscribe(wake.set)
        self._watchers.add(wake)
        try:
            sent = None
            while True:
                wake.clear()
                status = self.status(request.service)
                if status != sent:
                    await context.write(health_pb2.HealthCheckResponse(status=status))
                    sent = status
                elif self._board.state is State.STOPPED:
                    # An open Watch would hold up the server's stop.
                    await context.abort(grpc.StatusCode.UNAVAILABLE, "the server has stopped")
                else:
                    await wake.wait()
        finally:
            self._watchers.discard(wake)
            unsubscribe()

    # Registered only by a grpcio-health-checking that knows it; 1.81 does not.
    async def List(
        self, request: Any, context: grpc.aio.ServicerContext[Any, Any]
    ) -> health_pb2.HealthListResponse:
        self._board.refresh()
        return health_pb2.HealthListResponse(
            statuses={
                name: health_pb2.HealthCheckResponse(status=self.status(name))
                for name in ("", *self._names)
            }
        )

    def statistics(self) -> dict[str, int]:
        return {"watchers": len(self._watchers)}

    def _known(self) -> str:
        return ", ".join(repr(name) for name in ("", *self._names))
