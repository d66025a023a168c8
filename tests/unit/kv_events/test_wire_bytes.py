from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.kv_events import wire_bytes as wire
from smg_grpc_servicer.kv_events.blocks import end_of_block

I64 = st.integers(-(2**63), 2**63 - 1)
TOKEN = st.integers(0, 2**32 - 1)


@given(value=st.integers(0, 2**64 - 1))
def test_a_varint_is_what_protobuf_writes(value: int) -> None:
    wanted = common_pb2.KvEventBatch(sequence_number=value).SerializeToString()
    assert wire.varint(value) == (wanted[1:] or b"\0")


@given(hashes=st.lists(I64, max_size=40), event_id=st.integers(0, 2**63))
def test_an_event_is_what_protobuf_reads(hashes: list[int], event_id: int) -> None:
    removed = common_pb2.KvBlocksRemoved(block_hashes=hashes)
    data = wire.event(wire.REMOVED, removed.SerializeToString(), event_id)
    (read,) = common_pb2.KvEventBatch.FromString(data).events
    assert read.removed == removed
    assert read.event_id == event_id


@given(block_hash=I64, tokens=st.lists(TOKEN, max_size=80), parent=st.none() | I64)
def test_a_block_ends_where_protobuf_ends_it(
    block_hash: int, tokens: list[int], parent: int | None
) -> None:
    message = common_pb2.KvBlocksStored(parent_block_hash=parent, medium="GPU")
    message.blocks.add(block_hash=block_hash, token_ids=tokens)
    data = message.SerializeToString()
    end = end_of_block(data)
    assert common_pb2.KvBlocksStored.FromString(data[:end]).blocks == message.blocks
    del message.blocks[:]
    assert data[end:] == message.SerializeToString()
