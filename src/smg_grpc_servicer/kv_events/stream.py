"""One subscription's stream: what its places say is written, rank after rank, and load records."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from itertools import count

from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.core.errors import DataLoss
from smg_grpc_servicer.kv_events.history import Entry, View
from smg_grpc_servicer.kv_events.loads import Records
from smg_grpc_servicer.kv_events.relay import Relay
from smg_grpc_servicer.kv_events.sampler import LoadSampler
from smg_grpc_servicer.kv_events.snapshot import Snapshot
from smg_grpc_servicer.kv_events.subscriber import Lost, Place, Resync, Send

Write = Callable[[common_pb2.KvEventBatch], Awaitable[None]]

_TURN = 64
"""Batches of one rank before the others get their turn."""


class Stream:
    """Writes until `check` or a loss ends it.

    :param early_loads: the subscriber takes load records before a rank's first batch.
    """

    def __init__(
        self,
        relay: Relay,
        write: Write,
        places: Mapping[int, Place],
        loads: LoadSampler | None,
        *,
        early_loads: bool,
    ) -> None:
        self.wake = asyncio.Event()
        self._relay = relay
        self._write = write
        self._places = places
        self._loads = loads
        self._early_loads = early_loads
        samples = count(1)
        self._records = {rank: Records(lambda: next(samples)) for rank in places}
        self._events = 0
        """Events of the publishers so far; the next one's id is one more."""

    @property
    def lag(self) -> int:
        """Batches it is behind, of the rank that is furthest."""
        views = self._relay.histories
        return max(place.lag(views[rank].view()) for rank, place in self._places.items())

    async def run(self, lowest: int, missed: Sequence[Entry], check: Callable[[], None]) -> None:
        """:raises DataLoss: what the subscriber holds cannot be brought up to date.
        :raises Exception: what `check` raised.
        """
        unlisten = self._relay.listen(self.wake.set)
        unwatch = await self._loads.watch(self.wake.set) if self._loads is not None else None
        try:
            epoch = self._places[lowest].epoch
            for entry in missed:
                check()
                await self._send(lowest, entry, epoch)
            while True:
                self.wake.clear()
                check()
                await self._send_loads()
                more, until = await self._turn(check)
                if not more:
                    await self._sleep(until)
        finally:
            unlisten()
            if unwatch is not None:
                unwatch()

    async def _sleep(self, until: float | None) -> None:
        if until is None:
            await self.wake.wait()
            return
        delay = max(until - time.monotonic(), 0.0)
        timer = asyncio.get_running_loop().call_later(delay, self.wake.set)
        try:
            await self.wake.wait()
        finally:
            timer.cancel()

    async def _turn(self, check: Callable[[], None]) -> tuple[bool, float | None]:
        """Some of what each rank has; whether there may be more, and when to look at the latest."""
        more, times = False, []
        for rank, place in self._places.items():
            view = self._relay.histories[rank].view()
            step = place.next(view, time.monotonic())
            if isinstance(step, Lost):
                raise DataLoss(f"KV events of rank {rank}: {step.reason}")
            if isinstance(step, Send):
                more |= await self._send_after(rank, view, step.after)
            elif isinstance(step, Resync):
                await self._resync(rank, place, check)
                more = True
            elif step.until is not None:
                times.append(step.until)
        return more, min(times, default=None)

    async def _send_after(self, rank: int, view: View, after: int) -> bool:
        """Whether there may be more; what came meanwhile has woken the stream anyhow."""
        entries = self._relay.histories[rank].read(view.epoch, after, _TURN)
        for entry in entries:
            await self._send(rank, entry, view.epoch)
        return len(entries) in (0, _TURN)

    async def _send(self, rank: int, entry: Entry, epoch: int) -> None:
        batch = common_pb2.KvEventBatch.FromString(entry.data)
        shift = self._events - entry.first_event
        if shift:
            for event in batch.events:
                event.event_id += shift
        self._events += entry.events
        if self._loads is not None:
            sample = self._loads.samples.get(rank)
            if sample is not None:
                self._records[rank].with_batch(batch, sample, time.monotonic())
        await self._write(batch)
        self._places[rank].sent(epoch, entry.sequence)

    async def _resync(self, rank: int, place: Place, check: Callable[[], None]) -> None:
        """The live blocks in chunks. A new epoch in between leaves the subscriber with a part."""
        state = await self._relay.state(rank)
        if state is None:
            return
        snapshot = await asyncio.to_thread(Snapshot, state)
        chunks = snapshot.chunks()
        for index in range(len(snapshot)):
            data = await asyncio.to_thread(next, chunks)
            check()
            if index and self._relay.histories[rank].view().epoch != state.epoch:
                raise DataLoss(f"KV events of rank {rank}: they began anew during a snapshot")
            await self._write(common_pb2.KvEventBatch.FromString(data))
        place.begin(state.epoch, state.sequence, holds=snapshot.blocks > 0)

    async def _send_loads(self) -> None:
        if self._loads is None:
            return
        now = time.monotonic()
        for rank, place in self._places.items():
            sample, records = self._loads.samples.get(rank), self._records[rank]
            if sample is None or (place.at is None and not self._early_loads):
                continue
            if not records.due(sample, now):
                continue
            batch = common_pb2.KvEventBatch(
                sequence_number=place.at or 0, timestamp=time.time(), dp_rank=rank
            )
            records.alone(batch, sample, now)
            await self._write(batch)
