from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.kv_events.blocks import Blocks
from smg_grpc_servicer.kv_events.history import History
from smg_grpc_servicer.kv_events.record import RankRecord
from smg_grpc_servicer.kv_events.snapshot import Snapshot, State
from tests.support.kv_publisher import payload, removed, stored


def test_a_block_goes_with_its_last_copy() -> None:
    blocks = Blocks()
    tier = blocks.tier(1)
    for _ in range(10):
        tier.store(5, b"")
    assert blocks.live == 10
    for left in range(9, -1, -1):
        tier.remove(5)
        assert blocks.live == left
    tier.remove(5)
    assert blocks.live == 0
    assert not tier.records
    assert not tier.copies


def test_a_capture_does_not_follow_the_table() -> None:
    blocks = Blocks()
    blocks.tier(1).store(1, b"")
    captured = blocks.capture()
    blocks.clear()
    assert captured.live == len(list(captured.in_order())) == 1


def chunks(
    record_: RankRecord, sequence: int, **sizes: int
) -> tuple[Snapshot, list[common_pb2.KvEventBatch]]:
    snapshot = Snapshot(State(0, 0, sequence, 0, record_.blocks.capture()), **sizes)
    return snapshot, [common_pb2.KvEventBatch.FromString(data) for data in snapshot.chunks()]


@given(
    links=st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), max_size=30),
    gone=st.lists(st.integers(1, 12)),
)
def test_parents_come_before_their_children(links: list[tuple[int, int]], gone: list[int]) -> None:
    rank = RankRecord(0, History(), can_replay=False)
    events = [stored([block], parent=parent + 100) for block, parent in links]
    events += [stored([block + 100]) for _, block in links]
    events += [removed([block + 100]) for block in gone]
    rank.live(0, payload(*events))
    _, made = chunks(rank, 50, chunk_bytes=150)
    told = [event.stored for batch in made for event in batch.events if event.HasField("stored")]
    assert len(told) == rank.blocks.live
    hashes = [one.blocks[0].block_hash for one in told]
    for at, one in enumerate(told):
        if one.HasField("parent_block_hash") and one.parent_block_hash in hashes:
            assert one.parent_block_hash in hashes[:at]


def test_chunks_end_at_the_sequence_of_the_state_and_begin_with_a_clear() -> None:
    rank = RankRecord(0, History(), can_replay=False)
    rank.live(0, payload(*(stored([n], parent=n + 1, session_id="s") for n in range(1, 41))))
    snapshot, made = chunks(rank, 100, chunk_bytes=500)
    assert len(made) == len(snapshot) > 3
    assert [b.sequence_number for b in made] == list(range(101 - len(made), 101))
    assert [b.snapshot.index for b in made] == list(range(len(made)))
    assert {(b.snapshot.count, b.snapshot.blocks) for b in made} == {(len(made), 40)}
    clears = [e for b in made for e in b.events if e.HasField("cleared")]
    assert clears == [made[0].events[0]]
    assert all(b.ByteSize() < 700 for b in made)
    assert all(e.stored.session_id == "s" for b in made for e in b.events[1:])


def test_a_state_that_has_more_chunks_than_numbers_says_that_it_is_not_whole() -> None:
    rank = RankRecord(0, History(), can_replay=False)
    rank.live(0, payload(*(stored([n]) for n in range(1, 41))))
    snapshot, made = chunks(rank, 1, chunk_bytes=100, largest=400)
    assert [b.sequence_number for b in made] == [0, 1]
    assert snapshot.unknown_before == made[0].snapshot.unknown_before == 1
    assert sum(len(b.events) for b in made) - 1 == snapshot.blocks < 40


def test_an_empty_state_is_one_chunk() -> None:
    rank = RankRecord(0, History(), can_replay=False)
    _, (only,) = chunks(rank, 0)
    assert only.snapshot.blocks == 0
    assert len(only.events) == 1
