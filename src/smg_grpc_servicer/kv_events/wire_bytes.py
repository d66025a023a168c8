"""The messages of a `KvEventBatch` as bytes, written once and used for every subscriber.

A block's bytes go into the batch, the history and the live-block record alike. Field numbers are
those of common.proto; protobuf's own objects would take several times as long per block.
"""

from __future__ import annotations

from collections.abc import Sequence

from smg_grpc_proto.generated import common_pb2

_MASK = 0xFFFF_FFFF_FFFF_FFFF
_MEMO = 1 << 18

HASH = b"\x08"  # KvBlock.block_hash
TOKENS = b"\x12"  # KvBlock.token_ids, packed
SIZE = b"\x18"  # KvBlock.block_size
BLOCK = b"\x0a"  # KvBlocksStored.blocks
PARENT = b"\x10"  # KvBlocksStored.parent_block_hash
HASHES = b"\x0a"  # KvBlocksRemoved.block_hashes, packed
EVENT_ID = b"\x08"  # KvCacheEvent.event_id
STORED = b"\x12"  # KvCacheEvent.stored
REMOVED = b"\x1a"
CLEARED = b"\x22"
EVENT = b"\x1a"  # KvEventBatch.events


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)


class _Memo(dict[int, bytes]):
    """Varints of small numbers, made at first use; as many as a large vocabulary has."""

    def __missing__(self, value: int) -> bytes:
        made = _varint(value)
        if len(self) < _MEMO:
            self[value] = made
        return made


_memo = _Memo()
varint = _memo.__getitem__
"""Of a number that is not negative and, as a rule, small."""


def _number(value: int) -> bytes:
    """The varint of a number that may be large; the memo is for tokens."""
    return varint(value) if value < 1 << 14 else _varint(value)


def signed(value: int) -> bytes:
    """The varint of an int64: seven bits to a byte, all but the last with the high bit set."""
    value &= _MASK
    top = value >> 56
    if not top:
        return _varint(value)
    # Halved three times: 28 bits in 32, 14 in 16, 7 in 8.
    low = (value & 0x0FFF_FFFF) | (value & 0x00FF_FFFF_F000_0000) << 4
    low = (low & 0x3FFF_0000_3FFF) | (low & 0x0FFF_C000_0FFF_C000) << 2
    low = (low & 0x007F_007F_007F_007F) | (low & 0x3F80_3F80_3F80_3F80) << 1
    return (low | 0x8080_8080_8080_8080).to_bytes(8, "little") + varint(top)


def block(block_hash: int, tokens: Sequence[int], more: bytes) -> bytes:
    """A KvBlock; `more` are its other fields."""
    packed = b"".join(map(varint, tokens))
    return b"".join((HASH, signed(block_hash), TOKENS, varint(len(packed)), packed, more))


def field(tag: bytes, content: bytes) -> bytes:
    """A length-delimited field."""
    return tag + varint(len(content)) + content


def parent(parent_hash: int) -> bytes:
    return PARENT + signed(parent_hash)


def removed(hashes: Sequence[int], shared: bytes) -> bytes:
    """A KvBlocksRemoved; `shared` are its fields but the hashes."""
    return field(HASHES, b"".join(map(signed, hashes))) + shared


def event(kind: bytes, content: bytes, event_id: int = 0) -> bytes:
    """A KvCacheEvent as a field of a batch."""
    inner = kind + varint(len(content)) + content
    if event_id:
        inner = EVENT_ID + _number(event_id) + inner
    return EVENT + varint(len(inner)) + inner


def batch(sequence: int, timestamp: float, rank: int, events: Sequence[bytes]) -> bytes:
    """A KvEventBatch of events made by `event`."""
    head = common_pb2.KvEventBatch(sequence_number=sequence, timestamp=timestamp, dp_rank=rank)
    return b"".join((head.SerializeToString(), *events))
