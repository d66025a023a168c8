"""The one relay of an engine: a SUB socket per rank on a thread of its own, from start to close.

The thread decodes each batch once and writes it to its rank's history, from which every subscriber
reads by itself. Missed batches are asked for while the other ranks go on; a rank's live batches
meanwhile wait in its socket, so the overlap falls out by sequence number.
"""

from __future__ import annotations

import asyncio
import logging
import socket
import threading
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from typing import Any

import zmq

from smg_grpc_servicer.core.errors import Unavailable
from smg_grpc_servicer.kv_events.endpoints import Source
from smg_grpc_servicer.kv_events.hash_check import HashCheck
from smg_grpc_servicer.kv_events.history import DEFAULT_BATCHES, DEFAULT_BYTES, History
from smg_grpc_servicer.kv_events.record import Ask, RankRecord
from smg_grpc_servicer.kv_events.snapshot import State
from smg_grpc_servicer.kv_events.sockets import LiveSocket, ReplaySocket

log = logging.getLogger(__name__)

REPLAY_SECONDS = 5.0
"""How long the next batch of a replay may take."""
PROBE_SECONDS = 5.0
"""After this much silence the publisher is asked once whether that was all."""
PAUSE_SECONDS = 0.001
"""After each turn that read something: what comes meanwhile is read, and told, at one go, and the
event loop is not kept from its work by a thread that takes turns with it for every batch."""
_TURN = 128
"""Batches of one rank before the others get their turn."""


class _Rank:
    """One rank on the thread: its record, its sockets and its clocks."""

    def __init__(self, source: Source, record: RankRecord, live: LiveSocket) -> None:
        self.source = source
        self.record = record
        self.live = live
        self.replay: ReplaySocket | None = None
        self.deadline = 0.0
        self.probe_at: float | None = None
        self.waiters: list[Future[None]] = []


class Relay:
    """Batches in from `sources`, histories and snapshots out.

    :param batches, limit_bytes: what each rank's history may hold.
    :param check: of the hashes that are published.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        *,
        batches: int = DEFAULT_BATCHES,
        limit_bytes: int = DEFAULT_BYTES,
        check: HashCheck | None = None,
        context: zmq.Context[zmq.Socket[bytes]] | None = None,
    ) -> None:
        self.histories: Mapping[int, History] = {
            source.rank: History(batches, limit_bytes) for source in sources
        }
        self._sources = tuple(sources)
        self._check = check
        self._context = context or zmq.Context.instance()
        self._ranks: dict[int, _Rank] = {}
        self._calls: deque[tuple[Callable[[], None], Future[Any]]] = deque()
        self._wake_in, self._wake_out = socket.socketpair()
        self._wake_in.setblocking(False)
        self._wake_out.setblocking(False)
        self._listeners: dict[object, Callable[[], None]] = {}
        self._bad_frames: Counter[int] = Counter()
        self._poller: zmq.Poller | None = None
        self._stop = False
        self._thread: threading.Thread | None = None
        self.failure: str | None = None
        """Why the thread ended by itself; nothing comes any more then."""

    @property
    def ranks(self) -> tuple[int, ...]:
        return tuple(self.histories)

    @property
    def sources(self) -> Mapping[int, Source]:
        return {source.rank: source for source in self._sources}

    # Life; on any one thread.

    def start(self) -> None:
        """Open the sockets and begin to listen.

        :raises ConfigError: an address cannot be used; nothing stays open.
        """
        try:
            for source in self._sources:
                record = RankRecord(
                    source.rank,
                    self.histories[source.rank],
                    can_replay=source.replay is not None,
                    check=self._check,
                )
                live = LiveSocket(self._context, source)
                self._ranks[source.rank] = _Rank(source, record, live)
        except BaseException:
            self._close_sockets()
            raise
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()
        for source in self._sources:
            log.info(
                "KV events of rank %d: %s %s, %s",
                source.rank,
                "bound at" if source.bind else "from",
                source.live,
                f"replay from {source.replay}" if source.replay else "no replay",
            )

    def close(self, timeout: float = 2.0) -> None:
        """End the thread and close the sockets; may come twice."""
        self._stop = True
        self._wake()
        if self._thread is not None:
            self._thread.join(timeout)
            self._thread = None

    # For the event loop.

    def listen(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` on the running loop after changes, many at a time; returns the end."""
        loop = asyncio.get_running_loop()
        told = False

        def fire() -> None:
            nonlocal told
            told = False
            callback()

        def tell() -> None:
            nonlocal told
            if not told:
                told = True
                try:
                    loop.call_soon_threadsafe(fire)
                except RuntimeError:
                    self._listeners.pop(key, None)  # The loop is closed.

        key = object()
        self._listeners[key] = tell
        return lambda: self._listeners.pop(key, None) and None

    async def state(self, rank: int) -> State | None:
        """A rank's live blocks as of now; None while nothing is known."""
        future: Future[State | None] = Future()

        def capture() -> None:
            record = self._ranks[rank].record
            view = record.history.view()
            if not future.set_running_or_notify_cancel():
                return
            if view.last is None or view.base is None:
                future.set_result(None)
                return
            blocks = record.blocks.capture()
            future.set_result(State(rank, view.epoch, view.last, view.base, blocks))

        self._call(capture, future)
        return await asyncio.wrap_future(future)

    async def settled(self, rank: int) -> None:
        """Ask the publisher what is new, and wait for the end of the answer."""
        future: Future[None] = Future()

        def ask() -> None:
            at = self._ranks[rank]
            self._follow(at, at.record.connected() if at.record.can_replay else None)
            at.waiters.append(future)
            if not at.record.asking:
                self._settled(at)

        self._call(ask, future)
        await asyncio.wrap_future(future)

    def record(self, rank: int) -> RankRecord:
        """For reading what one dictionary look-up can read; the thread goes on writing."""
        return self._ranks[rank].record

    def statistics(self) -> dict[str, int]:
        """Sums over the ranks. After `close` only the counters (`…_total`) are not zero."""
        gauges: Counter[str] = Counter()
        totals: Counter[str] = Counter()
        for at in self._ranks.values():
            gauges.update(at.record.statistics() if self._thread is not None else {})
            totals.update(at.record.totals())
        totals["bad_frames"] = sum(self._bad_frames.values())
        totals.update({} if self._check is None else self._check.totals())
        return {
            "ranks": len(self._ranks) if self._thread is not None else 0,
            "listeners": len(self._listeners),
            **gauges,
            **{f"{name}_total": count for name, count in totals.items()},
        }

    def _call(self, call: Callable[[], None], future: Future[Any]) -> None:
        """Have the thread do it; it answers by `future`."""
        if self._thread is None or self._stop or self.failure is not None:
            _give_up(future)
            return
        self._calls.append((call, future))
        self._wake()

    def _wake(self) -> None:
        try:
            self._wake_in.send(b"\0")
        except BlockingIOError:
            pass  # It has been woken often enough.
        except OSError:
            pass  # It is closed.

    # The thread.

    def _run(self) -> None:
        try:
            for at in self._ranks.values():
                if at.live.monitor is None:
                    self._follow(at, at.record.connected())
            while not self._stop:
                self._turn()
        except Exception as error:
            log.exception("the KV event relay has failed")
            self.failure = f"{type(error).__name__}: {error}"
            self._tell()
        finally:
            for at in self._ranks.values():
                for waiter in at.waiters:
                    _give_up(waiter)
            while self._calls:
                _give_up(self._calls.popleft()[1])
            self._close_sockets()

    def _turn(self) -> None:
        if self._poller is None:
            self._poller = self._make_poller()
        self._poller.poll(self._timeout())
        try:
            while self._wake_out.recv(4096):
                pass
        except BlockingIOError:
            pass
        while self._calls:
            self._calls.popleft()[0]()
        changed = False
        for at in self._ranks.values():
            changed |= self._serve(at)
        if changed:
            self._tell()
            time.sleep(PAUSE_SECONDS)

    def _tell(self) -> None:
        for tell in tuple(self._listeners.values()):
            tell()

    def _make_poller(self) -> zmq.Poller:
        """A rank's live batches are not looked at while its replay is read."""
        poller = zmq.Poller()
        poller.register(self._wake_out, zmq.POLLIN)
        for at in self._ranks.values():
            source = at.live.socket if at.replay is None else at.replay.socket
            poller.register(source, zmq.POLLIN)
            if at.live.monitor is not None:
                poller.register(at.live.monitor, zmq.POLLIN)
        return poller

    def _timeout(self) -> int | None:
        times = [at.deadline for at in self._ranks.values() if at.replay is not None]
        times += [at.probe_at for at in self._ranks.values() if at.probe_at is not None]
        if not times:
            return None
        return max(int((min(times) - time.monotonic()) * 1000) + 1, 0)

    def _serve(self, at: _Rank) -> bool:
        """Everything that waits for one rank; whether its history changed."""
        changed = False
        for up in at.live.changes():
            changed = True
            if up:
                self._follow(at, at.record.connected())
            else:
                # What the lost publisher said last is in the socket already.
                self._read_live(at, limit=None)
                at.record.disconnected()
        if at.replay is not None:
            changed |= self._read_replay(at)
        if at.replay is None:
            changed |= self._read_live(at, limit=_TURN)
        now = time.monotonic()
        if at.probe_at is not None and now >= at.probe_at:
            at.probe_at = None
            self._follow(at, at.record.probe())
        return changed

    def _read_live(self, at: _Rank, limit: int | None) -> bool:
        read = 0
        while limit is None or read < limit:
            try:
                batch = at.live.receive()
            except zmq.Again:
                break
            except ValueError as error:
                self._bad(at, error)
                continue
            read += 1
            if batch is None or at.record.asking:
                continue  # Of a publisher that is gone; the replay in progress will show it.
            self._follow(at, at.record.live(*batch))
            if at.replay is not None and limit is not None:
                break
        if read:
            at.probe_at = time.monotonic() + PROBE_SECONDS if at.source.replay else None
        return read > 0

    def _read_replay(self, at: _Rank) -> bool:
        read = 0
        while at.replay is not None and read < _TURN:
            try:
                batch = at.replay.receive()
            except zmq.Again:
                if not read and time.monotonic() >= at.deadline:
                    self._end_replay(at, complete=False)
                    return True
                break
            except ValueError as error:
                self._bad(at, error)
                self._end_replay(at, complete=False)
                return True
            read += 1
            if batch is None or not at.record.replayed(*batch):
                self._end_replay(at, complete=True)
        if read:
            at.deadline = time.monotonic() + REPLAY_SECONDS
        return read > 0

    def _end_replay(self, at: _Rank, *, complete: bool) -> None:
        assert at.replay is not None
        at.replay.close()
        at.replay = self._poller = None
        self._follow(at, at.record.replay_ended(complete))
        if at.replay is None:
            self._settled(at)

    def _settled(self, at: _Rank) -> None:
        waiters, at.waiters = at.waiters, []
        for waiter in waiters:
            if waiter.set_running_or_notify_cancel():
                waiter.set_result(None)

    def _follow(self, at: _Rank, ask: Ask | None) -> None:
        """Do what the record asks."""
        if ask is None:
            return
        assert at.source.replay is not None
        assert at.replay is None
        self._poller = None
        at.replay = ReplaySocket(self._context, at.source.replay, ask.start)
        at.deadline = time.monotonic() + REPLAY_SECONDS

    def _bad(self, at: _Rank, error: ValueError) -> None:
        if not self._bad_frames[at.source.rank]:
            log.warning("KV events of rank %d: not a batch: %s", at.source.rank, error)
        self._bad_frames[at.source.rank] += 1

    def _close_sockets(self) -> None:
        for at in self._ranks.values():
            at.live.close()
            if at.replay is not None:
                at.replay.close()
        self._wake_in.close()
        self._wake_out.close()


def _give_up(future: Future[Any]) -> None:
    # Not a cancellation: the one who waits would take it for its own.
    if future.set_running_or_notify_cancel():
        future.set_exception(Unavailable("the KV event relay has ended"))
