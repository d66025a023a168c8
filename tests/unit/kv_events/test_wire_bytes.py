from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.kv_events import wire_bytes as wire

I64 = st.integers(-(2**63), 2**63 - 1)
TOKEN = st.integers(0, 2**32 - 1)


@given(block_hash=I64, tokens=st.lists(TOKEN, max_size=20), size=st.integers(0, 2**31 - 1))
def test_a_block_is_what_protobuf_reads(block_hash: int, tokens: list[int], size: int) -> None:
    data = wire.block(block_hash, tokens, wire.SIZE + wire.varint(size))
    wanted = common_pb2.KvBlock(block_hash=block_hash, token_ids=tokens, block_size=size)
    assert common_pb2.KvBlock.FromString(data) == wanted


@given(hashes=st.lists(I64, min_size=1), event_id=st.integers(0, 2**63))
def test_a_batch_is_what_protobuf_reads(hashes: list[int], event_id: int) -> None:
    event = wire.event(wire.REMOVED, wire.removed(hashes, b""), event_id)
    data = wire.batch(7, 1.5, 3, [event, wire.event(wire.CLEARED, b"")])
    read = common_pb2.KvEventBatch.FromString(data)
    assert (read.sequence_number, read.timestamp, read.dp_rank) == (7, 1.5, 3)
    assert list(read.events[0].removed.block_hashes) == hashes
    assert read.events[0].event_id == event_id
    assert read.events[1].WhichOneof("data") == "cleared"


@given(value=I64)
def test_a_hash_takes_as_many_bytes_as_protobuf_gives_it(value: int) -> None:
    wanted = common_pb2.KvBlocksStored(parent_block_hash=value).SerializeToString()
    assert wire.parent(value) == wanted
