"""A publisher's side of KV events without sockets: payloads, a truth to compare with, an index."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
from smg_grpc_proto.generated import common_pb2

BLOCK = 4
"""Tokens in a block."""


def stored(hashes: Sequence[int], parent: int | None = None, **more: Any) -> dict[str, Any]:
    """An event as vLLM sends it; the tokens follow from the hashes."""
    return {
        "type": "BlockStored",
        "block_hashes": list(hashes),
        "parent_block_hash": parent,
        "token_ids": [abs(h) % 1000 + at for h in hashes for at in range(BLOCK)],
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "GPU",
        "lora_name": None,
        **more,
    }


def removed(hashes: Sequence[int], **more: Any) -> dict[str, Any]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "GPU", **more}


def cleared() -> dict[str, Any]:
    return {"type": "AllBlocksCleared"}


def payload(*events: Any, ts: float = 1.0) -> bytes:
    return msgspec.msgpack.encode([ts, list(events), 0])


@dataclass
class Index:
    """Blocks as a subscriber of the gateway's kind builds them: copies per tier and hash."""

    blocks: Counter[tuple[int, int]] = field(default_factory=Counter)
    cursor: int = 0
    partial: bool = False
    """The servicer said that it does not know everything."""

    def apply(self, batch: common_pb2.KvEventBatch) -> None:
        if batch.HasField("load") and batch.load.load_only:
            return
        if batch.HasField("snapshot"):
            if batch.snapshot.index == 0:
                self.partial = batch.snapshot.unknown_before > 0
        else:
            assert self.cursor in (0, batch.sequence_number - 1), "a gap that nobody mentioned"
        self.cursor = batch.sequence_number
        for event in batch.events:
            self._event(event)

    def _event(self, event: common_pb2.KvCacheEvent) -> None:
        kind = event.WhichOneof("data")
        if kind == "stored":
            for block in event.stored.blocks:
                self.blocks[event.stored.tier, block.block_hash] += 1
        elif kind == "removed":
            for block_hash in event.removed.block_hashes:
                self.remove(event.removed.tier, block_hash)
        else:
            self.blocks.clear()

    def remove(self, tier: int, block_hash: int) -> None:
        key = (tier, block_hash)
        if self.blocks[key] <= 1:
            del self.blocks[key]
        else:
            self.blocks[key] -= 1


@dataclass
class Engine:
    """A publisher process: its cache, and every batch it has numbered."""

    start: float = 1.0
    """The time of its first batch; no two processes have the same."""
    truth: Index = field(default_factory=Index)
    batches: list[bytes] = field(default_factory=list)

    def publish(self, events: Iterable[dict[str, Any]]) -> int:
        """Number a batch; its sequence."""
        events = list(events)
        sequence = len(self.batches)
        self.batches.append(payload(*events, ts=self.start + sequence / 1024))
        for event in events:
            if event["type"] == "BlockStored":
                for block_hash in event["block_hashes"]:
                    self.truth.blocks[1, block_hash] += 1
            elif event["type"] == "BlockRemoved":
                for block_hash in event["block_hashes"]:
                    self.truth.remove(1, block_hash)
            else:
                self.truth.blocks.clear()
        return sequence
