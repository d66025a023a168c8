"""The events of a `KvEventBatch` as bytes, made once and used for every subscriber.

An event's content goes into the batch and, where it is one block, into the live-block record as it
is. Field numbers are those of common.proto.
"""

from __future__ import annotations

EVENT_ID = b"\x08"  # KvCacheEvent.event_id
STORED = b"\x12"  # KvCacheEvent.stored
REMOVED = b"\x1a"
CLEARED = b"\x22"
EVENT = b"\x1a"  # KvEventBatch.events


def varint(value: int) -> bytes:
    """Of a number that is not negative: seven bits to a byte, all but the last with the top one."""
    if value < 1 << 7:
        return bytes((value,))
    if value < 1 << 14:
        return bytes((value & 127 | 128, value >> 7))
    if value < 1 << 21:
        return bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14))
    return bytes((value & 127 | 128, value >> 7 & 127 | 128, value >> 14 & 127 | 128)) + varint(
        value >> 21
    )


def event(kind: bytes, content: bytes, event_id: int = 0) -> bytes:
    """A KvCacheEvent as a field of a batch."""
    head = kind + varint(len(content))
    if event_id:
        head = EVENT_ID + varint(event_id) + head
    return b"".join((EVENT, varint(len(head) + len(content)), head, content))
