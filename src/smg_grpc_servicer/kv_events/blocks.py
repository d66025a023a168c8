"""The blocks an engine holds, as its events told: what a snapshot is made of.

One `bytes` per live block and tier: a KvBlocksStored of it alone, as it goes over the wire.
Of a hash that is stored several times the copies are counted; the record goes with the last one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from smg_grpc_proto.generated import common_pb2

Namespace = tuple[str | None, str | None]
"""LoRA name and cache salt that a block's hash was computed under."""

NO_NAMESPACE: Namespace = (None, None)


def end_of_block(data: bytes) -> int:
    """Where a KvBlocksStored's first field, its first block, ends."""
    length, shift, at = 0, 0, 1
    while data[at] > 127:
        length |= (data[at] & 127) << shift
        shift += 7
        at += 1
    return at + 1 + (length | data[at] << shift)


def parent_of(data: bytes) -> int | None:
    message = common_pb2.KvBlocksStored.FromString(data)
    return message.parent_block_hash if message.HasField("parent_block_hash") else None


class Tier:
    """The live blocks of one storage tier, by their hash's low 64 bits, signed."""

    __slots__ = ("copies", "namespaces", "records")

    def __init__(self) -> None:
        self.records: dict[int, bytes] = {}
        self.copies: dict[int, int] = {}
        """Only of hashes that are stored more than once."""
        self.namespaces: dict[int, Namespace] = {}
        """Only of blocks that have one."""

    def store(self, block_hash: int, data: bytes, namespace: Namespace = NO_NAMESPACE) -> None:
        if block_hash in self.records:
            self.copies[block_hash] = self.copies.get(block_hash, 1) + 1
        self.records[block_hash] = data
        if namespace != NO_NAMESPACE:
            self.namespaces[block_hash] = namespace
        elif self.namespaces:
            self.namespaces.pop(block_hash, None)

    def remove(self, block_hash: int) -> None:
        if self.copies:
            copies = self.copies.get(block_hash)
            if copies is not None:
                if copies > 2:
                    self.copies[block_hash] = copies - 1
                else:
                    del self.copies[block_hash]
                return
        self.records.pop(block_hash, None)
        if self.namespaces:
            self.namespaces.pop(block_hash, None)

    def clear(self) -> None:
        self.records.clear()
        self.copies.clear()
        self.namespaces.clear()

    def namespace(self, block_hash: int) -> Namespace:
        return self.namespaces.get(block_hash, NO_NAMESPACE)

    def copy(self) -> Tier:
        other = Tier()
        other.records = self.records.copy()
        other.copies = self.copies.copy()
        return other


class Blocks:
    """One rank's live blocks in all tiers."""

    def __init__(self) -> None:
        self.tiers: dict[int, Tier] = {}

    def tier(self, number: int) -> Tier:
        tier = self.tiers.get(number)
        if tier is None:
            tier = self.tiers[number] = Tier()
        return tier

    def clear(self) -> None:
        """A tier stays the same object."""
        for tier in self.tiers.values():
            tier.clear()

    @property
    def live(self) -> int:
        """Blocks, physical copies counted."""
        return sum(
            len(tier.records) + sum(tier.copies.values()) - len(tier.copies)
            for tier in self.tiers.values()
        )

    def capture(self) -> Captured:
        """The blocks as they are now; the table may go on changing."""
        return Captured({number: tier.copy() for number, tier in self.tiers.items()}, self.live)

    def statistics(self) -> dict[str, int]:
        return {"live_blocks": self.live}


@dataclass(frozen=True, slots=True)
class Captured:
    """A table at one moment."""

    tiers: Mapping[int, Tier]
    live: int

    def in_order(self) -> Iterator[bytes]:
        """Every block's record, once per copy, parents before their children."""
        for tier in self.tiers.values():
            yield from _in_order(tier)


def _in_order(tier: Tier) -> Iterator[bytes]:
    records, copies = tier.records, tier.copies
    done: set[int] = set()
    for block_hash in records:
        # Most blocks come after their parents already; of the others the chain is walked up.
        chain: list[int] = []
        at: int | None = block_hash
        while at is not None and at in records and at not in done:
            done.add(at)
            chain.append(at)
            at = parent_of(records[at])
        for member in reversed(chain):
            data = records[member]
            for _ in range(copies.get(member, 1)):
                yield data
