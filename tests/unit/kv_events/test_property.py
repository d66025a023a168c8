"""Whatever happens between an engine and a subscriber, the subscriber is right or was told."""

from __future__ import annotations

import copy
import os
from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.kv_events.history import History
from smg_grpc_servicer.kv_events.record import Ask, RankRecord
from smg_grpc_servicer.kv_events.snapshot import Snapshot, State
from smg_grpc_servicer.kv_events.subscriber import (
    Lost,
    Place,
    Resume,
    Resync,
    Send,
    resume,
)
from tests.support.kv_publisher import Engine, Index, cleared, removed, stored

HASHES = st.integers(1, 6)
EVENT = st.one_of(
    st.builds(lambda h: stored([h]), HASHES),
    st.builds(lambda h: stored([h, h + 10], parent=h + 20), HASHES),
    st.builds(lambda h: removed([h]), HASHES),
    st.builds(cleared),
)
EVENTS = st.lists(EVENT, max_size=3)
RESTART = st.tuples(
    st.just("restart"),
    st.tuples(st.lists(st.lists(EVENT, max_size=2), max_size=6), st.booleans(), st.booleans()),
)
SPOIL = st.tuples(
    st.just("spoil"),
    st.tuples(EVENTS, EVENTS, st.sampled_from(("drop", "duplicate", "swap", "corrupt"))),
)
WIRE = ("deliver", "deliver", "connected", "probe")
READER = ("read", "read", "read", "reconnect", "resume_older")
STEP = st.one_of(
    st.tuples(st.just("heard"), EVENTS),
    st.tuples(st.just("heard"), EVENTS),
    st.tuples(st.just("publish"), EVENTS),
    SPOIL,
    SPOIL,
    st.tuples(st.sampled_from(WIRE), st.none()),
    st.tuples(st.sampled_from(READER), st.none()),
    st.tuples(st.sampled_from(READER), st.none()),
    RESTART,
)


@dataclass
class World:
    """An engine, the wire, the relay's record and one subscriber, without threads."""

    can_replay: bool
    kept: int
    """Batches the publisher can replay."""
    history: History
    now: float = 0.0
    processes: int = 1
    engine: Engine = field(default_factory=Engine)
    wire: deque[tuple[int, bytes]] = field(default_factory=deque)
    index: Index = field(default_factory=Index)
    place: Place = field(default_factory=Place)
    older: tuple[Index, int] | None = None
    """What the subscriber had at some time before, and of which epoch."""
    away: bool = False
    """The relay has lost the publisher and not noticed yet that it is there again."""

    def __post_init__(self) -> None:
        self.record = RankRecord(0, self.history, can_replay=self.can_replay, clock=self.clock)

    def clock(self) -> float:
        return self.now

    # Between publisher and relay.

    def publish(self, events: list[dict[str, object]]) -> None:
        sequence = self.engine.publish(events)
        self.wire.append((sequence, self.engine.batches[sequence]))

    def heard(self, events: list[dict[str, object]]) -> None:
        """Published, and nothing is on the wire any more."""
        self.publish(events)
        while self.wire:
            self.deliver()

    def spoil(self, how: tuple[list[dict[str, object]], list[dict[str, object]], str]) -> None:
        """Two more batches on the wire, and what happens to the first one there."""
        self.publish(how[0])
        self.publish(how[1])
        getattr(self, how[2])()

    def deliver(self) -> None:
        if self.wire:
            self.run(self.record.live(*self.wire.popleft()))

    def drop(self) -> None:
        if self.wire:
            self.wire.popleft()

    def duplicate(self) -> None:
        if self.wire:
            self.wire.appendleft(self.wire[0])

    def swap(self) -> None:
        if len(self.wire) > 1:
            self.wire[0], self.wire[1] = self.wire[1], self.wire[0]

    def corrupt(self) -> None:
        if self.wire:
            sequence, payload = self.wire.popleft()
            self.wire.appendleft((sequence, payload[: len(payload) // 2]))

    def restart(self, how: tuple[list[list[dict[str, object]]], bool, bool]) -> None:
        """Another process with an empty cache. What it says before the relay is connected again is
        not heard; what the old one said is read, as far as it arrived, when the connection breaks.
        """
        unheard, arrived, connected = how
        while self.wire and arrived:
            self.deliver()
        self.wire.clear()
        self.processes += 1
        self.engine = Engine(start=self.processes * 1e6)
        for events in unheard:
            self.engine.publish(events)
        self.record.disconnected()
        self.away = True
        if connected:
            self.connected()

    def connected(self) -> None:
        if self.away:
            self.away = False
            self.run(self.record.connected())

    def probe(self) -> None:
        self.run(self.record.probe())

    def run(self, ask: Ask | None) -> None:
        rounds = 0
        while ask is not None:
            rounds += 1
            assert rounds < 20, "the relay asks for ever"
            sent = len(self.engine.batches)
            for sequence in range(max(ask.start, sent - self.kept), sent):
                if not self.record.replayed(sequence, self.engine.batches[sequence]):
                    break
            ask = self.record.replay_ended(True)

    # Between relay and subscriber.

    def view_step(self) -> bool:
        """One step of the subscriber; False when there is nothing to do."""
        view = self.history.view()
        step = self.place.next(view, self.now)
        if isinstance(step, Lost):
            self.dropped()
        elif isinstance(step, Send):
            for entry in self.history.after(step.after, 2):
                self.index.apply(common_pb2.KvEventBatch.FromString(entry.data))
                self.place.sent(view.epoch, entry.sequence)
        elif isinstance(step, Resync):
            assert view.last is not None
            assert view.base is not None
            state = State(0, view.epoch, view.last, view.base, self.record.blocks.capture())
            snapshot = Snapshot(state, chunk_bytes=100)
            for data in snapshot.chunks():
                self.index.apply(common_pb2.KvEventBatch.FromString(data))
            self.place.begin(view.epoch, view.last, holds=snapshot.blocks > 0)
        else:
            return False
        return True

    read = view_step

    def dropped(self) -> None:
        self.index = Index()
        self.place = Place()

    def reconnect(self) -> None:
        self.older = copy.deepcopy(self.index), self.place.epoch
        self.resume_at(self.index.cursor)

    def resume_older(self) -> None:
        """It comes back with a state of before."""
        if self.older is not None:
            index, self.place.epoch = self.older
            self.index = copy.deepcopy(index)
            self.resume_at(self.index.cursor)

    def resume_at(self, cursor: int) -> None:
        view = self.history.view()
        if not cursor or resume(view, cursor) is not Resume.READY or view.epoch != self.place.epoch:
            self.dropped()  # OUT_OF_RANGE; or a publisher restarted while it was away
        else:
            self.place = Place.resumed(view, cursor)


@pytest.mark.timeout(900)
@settings(max_examples=5000 if "CI" in os.environ else 500)
@given(
    can_replay=st.booleans(),
    kept=st.integers(1, 30),
    batches=st.integers(1, 12),
    steps=st.lists(STEP, min_size=10, max_size=40),
)
def test_the_index_is_the_engines_or_the_subscriber_was_told(
    can_replay: bool, kept: int, batches: int, steps: list[tuple[str, object]]
) -> None:
    """C: no batch is ever lost silently: dropped, repeated, reordered, corrupt, of a restarted
    publisher, or read too late, the subscriber's blocks end as the engine's.
    """
    world = World(can_replay, kept, History(batches))
    for name, argument in steps:
        act = getattr(world, name)
        act() if argument is None else act(argument)

    # Everything settles: what is on the wire arrives, and one more batch shows any gap.
    world.connected()
    world.publish([stored([7])])
    while world.wire:
        world.deliver()
    world.now += 1000.0
    for _ in range(200):
        if not world.view_step():
            break
    else:
        raise AssertionError("the subscriber never comes to rest")

    truth = world.engine.truth.blocks
    if world.index.partial:
        # It knows that it lacks what was stored before; it has nothing that is not there.
        assert set(world.index.blocks) <= set(truth)
    else:
        assert world.index.blocks == truth
    assert world.record.statistics()["replaying"] == 0
