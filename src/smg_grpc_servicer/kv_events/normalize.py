"""Publisher events to the gateway's `KvCacheEvent`s, and into the record of live blocks.

What an index must not have is dropped and counted by reason: blocks that are not local, not of a
known tier, not of full attention, not the engine's own, or not whole. The gateway reads tiers and
namespaces as common.proto says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.kv_events import wire_bytes as wire
from smg_grpc_servicer.kv_events.blocks import Blocks, Namespace, Tier, record
from smg_grpc_servicer.kv_events.decode import (
    AnyRemoved,
    AnyStored,
    Batch,
    Cleared,
    ClearedArray,
    Event,
    Hash,
    Removed,
    RemovedArray,
    Stored,
    StoredArray,
)

DEVICE, HOST, DISK, EXTERNAL = 1, 2, 3, 4
"""KvCacheTier; the older `cache_level` is one less and unset on the device."""

TIERS = {
    **dict.fromkeys(("", "GPU", "DEVICE"), DEVICE),
    **dict.fromkeys(("CPU", "CPU_PINNED", "CPU_TIER1"), HOST),
    **dict.fromkeys(("CPU_TIER2", "DISK", "NVME", "STORAGE"), DISK),
    **dict.fromkeys(("EXTERNAL", "NETWORK", "REMOTE", "SHARED"), EXTERNAL),
}
"""By medium in upper case; a medium that is not told is the device's."""

MAIN_KINDS = frozenset({"full_attention", "mla_attention", "sink_full_attention"})
AGENT = "kvcr"
"""The owner of blocks that a residency agent manages, not the engine."""

_I32, _U32, _I64 = 2**31 - 1, 2**32 - 1, 2**63 - 1
_MEMO = 1024
"""Forms kept; session ids and salts could make any number of them."""


def fold(value: Hash) -> int:
    """A hash's low 64 bits, unsigned; on the wire they are signed."""
    if isinstance(value, int):
        return value & 0xFFFF_FFFF_FFFF_FFFF
    return int.from_bytes(value[-8:], "big")


class _Form:
    """What all stores with the same fields beside blocks and parent have in common."""

    __slots__ = ("level", "namespace", "shared", "table", "tier")

    def __init__(
        self, tier: int, table: Tier, namespace: Namespace, level: bytes, shared: bytes
    ) -> None:
        self.tier = tier
        self.table = table
        self.namespace = namespace
        self.level = level
        """A block's own fields: lora_id and cache_level."""
        self.shared = shared
        """The event's fields but blocks and parent."""


class Normalizer:
    """One rank's events, in order. Keeps what later events depend on: groups, blocks, counters."""

    def __init__(self, rank: int, blocks: Blocks) -> None:
        self.rank = rank
        self.blocks = blocks
        self.inputs = 0
        """Events seen; they number those that are forwarded."""
        self.forwarded = 0
        self.dropped: Counter[str] = Counter()
        self.groups: dict[int, bool] = {}
        """Whether a KV cache group is one of full attention."""
        self._forms: dict[tuple[Any, ...], _Form | str] = {}
        self._removals: dict[tuple[Any, ...], bytes] = {}

    def forget(self) -> None:
        """Another publisher process: nothing it said before holds."""
        self.groups.clear()
        self._forms.clear()

    def batch(self, sequence: int, batch: Batch) -> bytes:
        """A KvEventBatch's bytes; the record of blocks follows."""
        events = []
        for event in batch.events:
            self.inputs += 1
            made = self._event(event)
            if isinstance(made, str):
                self.dropped[made] += 1
            else:
                events.append(made)
        self.forwarded += len(events)
        return wire.batch(sequence, batch.timestamp, self.rank, events)

    def _event(self, event: Event) -> bytes | str:
        """The event's bytes, or why it is not forwarded."""
        if isinstance(event, (Stored, StoredArray)):
            return self._stored(event)
        if isinstance(event, (Removed, RemovedArray)):
            return self._removed(event)
        if isinstance(event, (Cleared, ClearedArray)):
            return self._cleared(event)
        return event.reason

    def _stored(self, event: AnyStored) -> bytes | str:
        form = self._form(event)
        if isinstance(form, str):
            return form
        hashes = [fold(value) for value in event.block_hashes]
        parent = None if event.parent_block_hash is None else fold(event.parent_block_hash)
        reason = _shape(hashes, parent, event)
        if reason is not None:
            return reason
        keys, tokens, size = event.extra_keys, event.token_ids, event.block_size
        table, namespace, shared = form.table, form.namespace, form.shared
        if keys or (table.namespaces and parent is not None):
            namespace = self._namespace(event, table, parent)
            if namespace != form.namespace:
                shared = self._shared_fields(event, form.tier, namespace)
        tail = wire.SIZE + wire.varint(size) + form.level
        parts, previous, start = [], parent, 0
        for at, block_hash in enumerate(hashes):
            more = tail
            if keys is not None and at < len(keys):
                more = tail + extra_keys(keys[at])
            mine = tokens if len(hashes) == 1 else tokens[start : start + size]
            start += size
            one = wire.field(wire.BLOCK, wire.block(block_hash, mine, more))
            parts.append(one)
            table.store(block_hash, record(previous, one + shared), namespace)
            previous = block_hash
        if parent is not None:
            parts.append(wire.parent(parent))
        parts.append(shared)
        return wire.event(wire.STORED, b"".join(parts), self.inputs)

    def _form(self, event: AnyStored) -> _Form | str:
        """The event's form, or why it is nobody's business; mostly the same all day."""
        key = (
            event.medium,
            event.locality,
            event.ownership,
            event.group_idx,
            event.kv_cache_spec_kind,
            event.kv_cache_spec_sliding_window,
            event.session_id,
            event.lora_name,
            event.lora_id,
            event.cache_salt,
        )
        form = self._forms.get(key)
        if form is None:
            form = self._new_form(event)
            if len(self._forms) >= _MEMO:
                self._forms.clear()
            self._forms[key] = form
        return form

    def _new_form(self, event: AnyStored) -> _Form | str:
        tier = self._tier(event)
        if isinstance(tier, str):
            return tier
        level = b"\x28" + wire.varint(tier - 1) if tier != DEVICE else b""
        if event.lora_id is not None and abs(event.lora_id) <= _I64:
            level = b"\x20" + wire.signed(event.lora_id) + level
        namespace = (event.lora_name or None, event.cache_salt or None)
        shared = self._shared_fields(event, tier, namespace)
        return _Form(tier, self.blocks.tier(tier), namespace, level, shared)

    def _removed(self, event: AnyRemoved) -> bytes | str:
        tier = self._tier(event)
        if isinstance(tier, str):
            return tier
        if not event.block_hashes:
            return "placeholder"
        hashes = [fold(value) for value in event.block_hashes]
        remove = self.blocks.tier(tier).remove
        for block_hash in hashes:
            remove(block_hash)
        key = (tier, event.medium, event.group_idx, event.ownership)
        shared = self._removals.get(key)
        if shared is None:
            message = common_pb2.KvBlocksRemoved(
                tier=tier,  # type: ignore[arg-type]
                medium=event.medium,
                group_idx=_u32(event.group_idx),
                locality=common_pb2.KV_CACHE_LOCALITY_LOCAL,
                ownership=event.ownership,
                cache_level=tier - 1 if tier != DEVICE else None,
            )
            shared = message.SerializeToString()
            if len(self._removals) >= _MEMO:
                self._removals.clear()
            self._removals[key] = shared
        return wire.event(wire.REMOVED, wire.removed(hashes, shared), self.inputs)

    def _cleared(self, event: Cleared | ClearedArray) -> bytes | str:
        if _is_agent(event.ownership):
            return "unsupported_ownership"
        self.blocks.clear()
        message = common_pb2.KvCacheCleared(ownership=event.ownership)
        return wire.event(wire.CLEARED, message.SerializeToString(), self.inputs)

    def _tier(self, event: AnyStored | AnyRemoved) -> int | str:
        """The tier of the blocks, or why they are nobody's business."""
        if event.ownership is not None and _is_agent(event.ownership):
            return "unsupported_ownership"
        if event.locality is not None and event.locality.upper() != "LOCAL":
            return "non_local_locality"
        medium = event.medium
        tier = DEVICE if medium is None or medium == "GPU" else TIERS.get(medium.upper())
        if tier is None:
            return "unknown_medium"
        if event.group_idx is not None and not self._is_main(event, event.group_idx):
            return "non_main_attention_group"
        if event.group_idx is None and not isinstance(event, (Removed, RemovedArray)):
            kind = event.kv_cache_spec_kind
            if kind is not None and kind.lower() not in MAIN_KINDS:
                return "non_main_attention_group"
        return tier

    def _is_main(self, event: AnyStored | AnyRemoved, group: int) -> bool:
        if not isinstance(event, (Removed, RemovedArray)):
            kind = event.kv_cache_spec_kind
            main = None if kind is None else kind.lower() in MAIN_KINDS
            if main is not None and main is not self.groups.get(group):
                self.groups[group] = main
                self._forms.clear()  # which were made by what was known of groups before
        return self.groups.get(group, True)

    def _namespace(self, event: AnyStored, table: Tier, parent: int | None) -> Namespace:
        """LoRA name and salt: the event's own, the first block's extra keys', the parent's."""
        lora, salt = event.lora_name or None, event.cache_salt or None
        if salt is None and event.extra_keys:
            first = event.extra_keys[0]
            if isinstance(first, (list, tuple)):
                texts = (key for key in first if isinstance(key, str) and key and key != lora)
                salt = next(texts, None)
        if parent is not None and table.namespaces and (lora is None or salt is None):
            inherited = table.namespace(parent)
            return lora or inherited[0], salt or inherited[1]
        return lora, salt

    def _shared_fields(self, event: AnyStored, tier: int, namespace: Namespace) -> bytes:
        """Everything of a KvBlocksStored but its blocks and parent."""
        return common_pb2.KvBlocksStored(
            tier=tier,  # type: ignore[arg-type]
            medium=event.medium,
            group_idx=_u32(event.group_idx),
            kv_cache_spec_kind=event.kv_cache_spec_kind,
            kv_cache_spec_sliding_window=_u32(event.kv_cache_spec_sliding_window),
            locality=common_pb2.KV_CACHE_LOCALITY_LOCAL,
            ownership=event.ownership,
            session_id=event.session_id,
            lora_name=namespace[0],
            cache_salt=namespace[1],
        ).SerializeToString()


def _shape(hashes: Sequence[int], parent: int | None, event: AnyStored) -> str | None:
    """Why the blocks cannot be told apart or do not fit their tokens."""
    size, tokens = event.block_size, event.token_ids
    if not hashes or not tokens:
        return "placeholder"
    if not 0 < size <= _I32 or len(hashes) * size != len(tokens):
        return "unaligned_blocks"
    if parent in hashes or (len(hashes) > 1 and len(set(hashes)) != len(hashes)):
        return "self_referencing_hashes"
    return None


def extra_keys(keys: Any) -> bytes:
    """One block's extra keys as fields of a KvBlock; shapes that nobody knows are left out."""
    if not isinstance(keys, (list, tuple)):
        return b""
    block = common_pb2.KvBlock()
    for key in keys:
        if isinstance(key, str):
            block.extra_keys.add(text=key)
        elif isinstance(key, bytes):
            block.extra_keys.add(blob=key)
        elif _is_i64(key):
            block.extra_keys.add(number=key)
        elif isinstance(key, (list, tuple)) and len(key) == 2:
            name, offset = key
            if isinstance(name, str) and _is_i64(offset):
                item = common_pb2.KvMultimodalKey(identifier=name, offset=offset)
                block.extra_keys.add(multimodal=item)
    return block.SerializeToString()


def _is_i64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_I64 - 1 <= value <= _I64


def _is_agent(owner: str | None) -> bool:
    return owner is not None and owner.lower() == AGENT


def _u32(value: int | None) -> int | None:
    return value if value is not None and 0 <= value <= _U32 else None
