"""The body of `SubscribeKvEvents`: a cursor is judged, then headers, then batches until it ends.

The gateway's rules: headers within 2 s; OUT_OF_RANGE only instead of headers and never to cursor
0; after DATA_LOSS it begins anew at once. The stream ends UNAVAILABLE when the server stops or the
engine dies. One cursor comes for all ranks: it is that of the lowest, the others are sent whole.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections import Counter
from typing import Any

import grpc
import zmq

from smg_grpc_servicer.core.errors import DataLoss, EngineDead, Internal, OutOfRange, Unavailable
from smg_grpc_servicer.core.health import State, StatusBoard
from smg_grpc_servicer.core.status import refuse
from smg_grpc_servicer.kv_events import older
from smg_grpc_servicer.kv_events.cursor import too_early
from smg_grpc_servicer.kv_events.history import Entry
from smg_grpc_servicer.kv_events.relay import Relay
from smg_grpc_servicer.kv_events.sampler import LoadSampler
from smg_grpc_servicer.kv_events.stream import Stream
from smg_grpc_servicer.kv_events.subscriber import Place, Resume, resume

log = logging.getLogger(__name__)

Message = Any
Context = grpc.aio.ServicerContext[Any, Any]

COUNTERS = ("subscriptions", "older_replays", "data_loss", "out_of_range")

_HOSTS = 1024


class KvEventService:
    """All subscriptions of one relay. Made, used and closed on the event loop."""

    def __init__(
        self, relay: Relay, board: StatusBoard, *, loads: LoadSampler | None = None
    ) -> None:
        self.relay = relay
        self.board = board
        self.loads = loads
        self.counts: Counter[str] = Counter()
        self._streams: set[Stream] = set()
        self._hosts: dict[str, int] = {}
        """By client address: the epoch of the lowest rank that it was last sent something of."""

    async def subscribe(self, request: Message, context: Context) -> None:
        """Serve one subscription; it ends with exactly one status."""
        try:
            await self._subscribe(request, context)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            if isinstance(error, (DataLoss, OutOfRange)):
                self.counts["data_loss" if isinstance(error, DataLoss) else "out_of_range"] += 1
                log.info("a KV event subscription ends: %s", error)
            await refuse(context, error)

    async def _subscribe(self, request: Message, context: Context) -> None:
        self._require_serving(request)
        cursor = int(request.start_sequence_number)
        host = context.peer().rpartition(":")[0]
        lowest = min(self.relay.ranks)
        places = {rank: Place(named=cursor != 0) for rank in self.relay.ranks}
        missed: list[Entry] = []
        if cursor:
            places[lowest], missed = await self._resume(lowest, cursor, host)
        await context.send_initial_metadata(())
        stream = Stream(
            self.relay,
            context.write,
            places,
            self.loads,
            early_loads=request.load_records_before_first_batch,
        )
        self._streams.add(stream)
        self.counts["subscriptions"] += 1
        unsubscribe = self.board.subscribe(stream.wake.set)
        try:
            await stream.run(lowest, missed, self._check)
        finally:
            unsubscribe()
            self._streams.discard(stream)
            self._remember(host, places[lowest])

    async def close(self) -> None:
        """After the board has stopped; ends the relay's thread."""
        if self.loads is not None:
            self.loads.close()
        await asyncio.to_thread(self.relay.close)

    def statistics(self) -> dict[str, int]:
        streams = tuple(self._streams)
        loads = self.loads.statistics() if self.loads is not None else {}
        return {
            **self.relay.statistics(),
            **loads,
            "subscribers": len(streams),
            "lag_batches": max((stream.lag for stream in streams), default=0),
            **{f"{name}_total": self.counts[name] for name in COUNTERS},
        }

    async def _resume(self, rank: int, cursor: int, host: str) -> tuple[Place, list[Entry]]:
        """The place of a cursor, and what has to be sent before the history goes on.

        :raises OutOfRange: what follows the cursor cannot be had.
        """
        history = self.relay.histories[rank]
        until = time.monotonic() + older.SECONDS
        if resume(history.view(), cursor) is Resume.SETTLING:
            try:
                await asyncio.wait_for(self.relay.settled(rank), older.SECONDS)
            except asyncio.TimeoutError:
                log.debug("the publisher of rank %d did not say in time what is new", rank)
        view = history.view()
        if self._hosts.get(host, view.epoch) != view.epoch:
            raise OutOfRange(f"start_sequence_number: got {cursor}, of before: {view.reason}")
        verdict = resume(view, cursor)
        if verdict is Resume.READY:
            return Place.resumed(view, cursor), []
        missed = None
        if verdict is Resume.OLDER:
            self.counts["older_replays"] += 1
            missed = await asyncio.to_thread(
                older.fetch,
                self.relay.sources[rank],
                self.relay.record(rank),
                cursor,
                context=zmq.Context.instance(),
                seconds=until - time.monotonic(),
            )
        if not missed:
            held = "none" if view.last is None else f"{view.first} to {view.last}"
            raise OutOfRange(
                f"start_sequence_number: got {cursor}, and what follows it cannot be had; the "
                f"batches here: {held}; 0 begins with the current state"
            )
        return Place.resumed(view, cursor), missed

    def _require_serving(self, request: Message) -> None:
        board = self.board
        if board.death is None and board.state in (State.LOADING, State.WARMING):
            raise too_early(request) or Unavailable(f"not ready: {board.reason}")
        board.require_accepting()

    def _check(self) -> None:
        """:raises Unavailable: it is over."""
        if self.board.death is not None:
            raise EngineDead(self.board.reason)
        if self.board.state is State.STOPPED:
            raise Unavailable("the server has stopped")
        if self.relay.failure is not None:
            raise Internal(f"the KV event relay has failed: {self.relay.failure}")

    def _remember(self, host: str, place: Place) -> None:
        if place.at is None:
            return
        self._hosts.pop(host, None)
        self._hosts[host] = place.epoch
        while len(self._hosts) > _HOSTS:
            del self._hosts[next(iter(self._hosts))]
