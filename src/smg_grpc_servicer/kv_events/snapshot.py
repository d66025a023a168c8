"""A rank's live blocks as `KvSnapshotChunk` batches (common.proto says what a chunk must be).

The chunks' sequence numbers end at the one the state was taken at, so there can be no more chunks
than numbers; what then does not fit is left out, and `unknown_before` says that the state is not
whole. Everything here runs off the event loop, chunk by chunk.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.core.messages import MAX_MESSAGE_BYTES
from smg_grpc_servicer.kv_events import wire_bytes as wire
from smg_grpc_servicer.kv_events.blocks import Captured

CHUNK_BYTES = 1024 * 1024
"""What a chunk takes as long as there are numbers enough."""
_LARGEST = MAX_MESSAGE_BYTES - 8192
_EVENT_BYTES = 16
"""Tags and lengths of one event."""

_CLEAR = wire.event(wire.CLEARED, b"")


@dataclass(frozen=True, slots=True)
class State:
    """A rank's blocks as of a sequence number."""

    rank: int
    epoch: int
    sequence: int
    unknown_before: int
    blocks: Captured


class Snapshot:
    """The chunks of a state; `count` and `sequence` are known before the first is made."""

    def __init__(
        self, state: State, *, chunk_bytes: int = CHUNK_BYTES, largest: int = _LARGEST
    ) -> None:
        self.state = state
        numbers = state.sequence + 1
        self._records = tuple(state.blocks.in_order())
        counts, fits = _pack(self._records, chunk_bytes, None)
        if len(counts) > numbers:
            counts, fits = _pack(self._records, largest, numbers)
        self._counts = counts
        self.blocks = sum(counts)
        self.unknown_before = state.unknown_before if fits else max(state.unknown_before, 1)

    def __len__(self) -> int:
        return len(self._counts)

    def chunks(self) -> Iterator[bytes]:
        """A serialized KvEventBatch each."""
        state, count = self.state, len(self._counts)
        records = iter(self._records)
        for index, size in enumerate(self._counts):
            head = common_pb2.KvEventBatch(
                sequence_number=state.sequence - count + 1 + index,
                timestamp=time.time(),
                dp_rank=state.rank,
                snapshot=common_pb2.KvSnapshotChunk(
                    index=index,
                    count=count,
                    blocks=self.blocks,
                    unknown_before=self.unknown_before,
                ),
            )
            parts = [head.SerializeToString()]
            if not index:
                parts.append(_CLEAR)
            parts += [wire.event(wire.STORED, next(records)) for _ in range(size)]
            yield b"".join(parts)


def _pack(records: Sequence[bytes], limit: int, most: int | None) -> tuple[list[int], bool]:
    """Blocks per chunk, and whether all fit into the `most` chunks there may be."""
    counts, size, blocks = [], 0, 0
    for data in records:
        added = len(data) + _EVENT_BYTES
        if blocks and size + added > limit:
            counts.append(blocks)
            size = blocks = 0
            if most is not None and len(counts) == most:
                return counts, False
        size += added
        blocks += 1
    counts.append(blocks)
    return counts, True
