"""SGLang's scheduler as this process sees it: requests out, outputs and control replies in.

The seam (what others may build on):

* `Sockets.bind(port_args, skip_tokenizer_init)` (`sockets.py`) comes before the ranks start;
* `RequestManager(sockets, num_ranks=…, on_dead=…)`, then `await start()` on the serving loop,
  `await close(reason)` at the end; `on_dead(reason)` comes once, when receiving ends for any
  other reason;
* `send_communicator_req(req, "profile_communicator", timeout=600.0)` is what SGLang's HTTP sidecar
  calls; results carry `.success` and `.message`; `GrpcRequestManager` is its name for others;
* `last_receive`: `monotonic` seconds of the scheduler's last push, None before the first;
* `statistics()`: all zeros when nothing runs.

One dispatcher serves both sockets: whatever comes on either goes by its type. Ids are ours
(`new_id`), so that no client's id can be a prefix of another's, which is how the scheduler matches
aborts, or begin with the word that marks its health checks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from itertools import count
from time import monotonic
from typing import Any

from smg_grpc_servicer.core.errors import EngineDead
from smg_grpc_servicer.sglang import communicators, profiles
from smg_grpc_servicer.sglang.communicators import Communicators
from smg_grpc_servicer.sglang.outputs import Sink
from smg_grpc_servicer.sglang.sockets import Sockets

log = logging.getLogger(__name__)

HEALTH_CHECK = "HEALTH_CHECK"
"""Ids that begin so are the scheduler's health probes: a busy one drops them."""


class RequestManager:
    """See the module."""

    def __init__(
        self,
        sockets: Sockets,
        *,
        num_ranks: int,
        on_dead: Callable[[str], None],
    ) -> None:
        self.num_ranks = num_ranks
        self.last_receive: float | None = None
        self._sockets = sockets
        self._on_dead: Callable[[str], None] = on_dead
        self._sinks: dict[str, Sink] = {}
        self._serial = count(1)
        self._calls = Communicators(self.send, num_ranks)
        self._pushes: set[asyncio.Future[None]] = set()
        self._strangers: set[str] = set()
        self._gone: EngineDead | None = None

    # Life.

    async def start(self) -> None:
        """Begin to receive, on the running loop."""
        from sglang.srt.managers import io_struct

        self._kinds: dict[type, Callable[[Any], None]] = {
            io_struct.BatchTokenIDOutput: self._outputs,
            io_struct.BatchEmbeddingOutput: self._outputs,
            io_struct.AbortReq: self._aborted,
            io_struct.HealthCheckOutput: lambda message: None,
        }
        self._abort_type = io_struct.AbortReq
        self._profile_type, self._profile_answer = io_struct.ProfileReq, io_struct.ProfileReqOutput
        self._sockets.start(self._received, self._broken)

    async def close(self, reason: str) -> None:
        """Stop; every request still here ends UNAVAILABLE with `reason`."""
        self._end(EngineDead(reason))
        await self._sockets.close()

    def dead(self, reason: str) -> None:
        """The scheduler is gone, says who watches its processes; `on_dead` is not called."""
        self._end(EngineDead(reason))

    def _broken(self, error: Exception) -> None:
        if self._gone is None:
            reason = f"the connection to the scheduler broke: {type(error).__name__}: {error}"
            log.error("%s", reason)
            self._end(EngineDead(reason))
            self._on_dead(reason)

    def _end(self, error: EngineDead) -> None:
        if self._gone is not None:
            return
        self._gone = error
        for sink in list(self._sinks.values()):
            sink.failed(error)
        self._sinks.clear()
        self._calls.fail(error)
        for push in self._pushes:
            if not push.done():
                push.set_exception(error)

    # Requests.

    def new_id(self, request_id: str, index: int | str = 0) -> str:
        """An id for the scheduler: none is a prefix of another, whatever clients call theirs."""
        return f"{next(self._serial)}.{index}:{request_id}"

    def begin(self, sink: Sink, request: Any) -> None:
        """Send a request (its `rid` from `new_id`); the sink hears all about it.

        :raises Unavailable: the scheduler cannot take it; nothing is kept then.
        """
        self._sinks[request.rid] = sink
        try:
            self.send(request)
        except BaseException:
            del self._sinks[request.rid]
            raise

    def drop(self, rid: str) -> None:
        """Nobody listens for this id any more."""
        self._sinks.pop(rid, None)

    def stop(self, rid: str) -> None:
        """Tell the scheduler to stop it; never raises."""
        if self._gone is not None:
            return
        try:
            self.send(self._abort_type(rid=rid))
        except Exception as error:
            # Without a scheduler there is nothing to stop; who watches it tells.
            log.debug("an abort was not sent: %s", error)

    def forward(self, news: Any) -> None:
        """Send word about a request that may be over; never raises."""
        if self._gone is None and news.rid in self._sinks:
            self.send(news)

    def send(self, message: Any) -> None:
        """:raises Unavailable: the scheduler is gone."""
        if self._gone is not None:
            raise self._gone
        self._sockets.send(message)

    # Control.

    async def send_communicator_req(
        self, req: Any, communicator_name: str, timeout: float = 30.0
    ) -> list[Any]:
        """One reply per rank.

        :raises ValueError: no such communicator.
        :raises asyncio.TimeoutError: a rank did not answer.
        """
        if communicator_name not in communicators.names():
            raise ValueError(f"SGLang has no communicator named {communicator_name!r}")
        if isinstance(req, self._profile_type):
            refused = await asyncio.to_thread(profiles.refusal, req)
            if refused is not None:
                return [self._profile_answer(success=False, message=refused)]
        return await self._calls.call(req, timeout)

    async def next_push(self) -> None:
        """Wait for anything at all from the scheduler."""
        push: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._gone is not None:
            raise self._gone
        self._pushes.add(push)
        try:
            await push
        finally:
            self._pushes.discard(push)

    # What comes in.

    def _received(self, message: Any) -> None:
        self.last_receive = monotonic()
        if self._pushes:
            for push in self._pushes:
                if not push.done():
                    push.set_result(None)
        handle = self._kinds.get(type(message))
        if handle is not None:
            handle(message)
        elif not self._calls.reply(message):
            self._stranger(type(message).__name__)

    def _stranger(self, kind: str) -> None:
        """Told once: another release may send it with every step."""
        if kind not in self._strangers:
            self._strangers.add(kind)
            log.warning("the scheduler sends a %s, which nobody asked for", kind)

    def _outputs(self, batch: Any) -> None:
        sinks = self._sinks
        for at, rid in enumerate(batch.rids):
            sink = sinks.get(rid)
            if sink is not None:
                try:
                    sink.output(batch, at)
                except Exception as error:
                    # This request only: its neighbours in the batch are fine.
                    log.warning("an output of request %r was not understood: %s", rid, error)
                    self._failed(sink, error)

    def _failed(self, sink: Sink, error: Exception) -> None:
        try:
            sink.failed(error)
        except Exception:
            log.exception("a request could not be ended")

    def _aborted(self, message: Any) -> None:
        """The scheduler ended a request that was queued, or dropped it for a better one."""
        sink = self._sinks.get(message.rid)
        if sink is not None:
            reason = message.finished_reason
            if reason is None and message.abort_message:
                reason = {"type": "abort", "message": message.abort_message}
            try:
                sink.aborted(reason)
            except Exception as error:
                log.warning("an abort of request %r was not understood: %s", message.rid, error)
                self._failed(sink, error)

    def statistics(self) -> dict[str, int]:
        return {
            "requests": len(self._sinks),
            "waiting_for_push": len(self._pushes),
            **self._calls.statistics(),
        }


GrpcRequestManager = RequestManager
