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
from smg_grpc_servicer.kv_events.blocks import Blocks, Namespace, Tier, end_of_block
from smg_grpc_servicer.kv_events.decode import (
    AnyRemoved,
    AnyStored,
    Batch,
    Cleared,
    ClearedArray,
    Event,
    Removed,
    RemovedArray,
    Stored,
    StoredArray,
    fold,
)
from smg_grpc_servicer.kv_events.hash_check import HashCheck

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

REASONS = (
    "unknown_type",
    "malformed",
    "unsupported_ownership",
    "non_local_locality",
    "unknown_medium",
    "non_main_attention_group",
    "placeholder",
    "unaligned_blocks",
    "self_referencing_hashes",
)
"""Why an event is not forwarded."""

_I32, _U32, _I64 = 2**31 - 1, 2**32 - 1, 2**63 - 1
_MEMO = 1024
"""Forms kept; session ids and salts could make any number of them."""


class _Form:
    """A store with the same fields beside hashes and tokens; mostly the same one all day.

    Its message is filled anew for each block: that costs half of making one.
    """

    __slots__ = ("block", "message", "namespace", "table")

    def __init__(
        self, message: common_pb2.KvBlocksStored, table: Tier, namespace: Namespace
    ) -> None:
        self.message = message
        (self.block,) = message.blocks
        self.table = table
        self.namespace = namespace

    def copy(self) -> _Form:
        """With a message of its own: what is added to one stays in its memory for good."""
        message = common_pb2.KvBlocksStored()
        message.CopyFrom(self.message)
        return _Form(message, self.table, self.namespace)

    def bytes(self, block_hash: int, parent: int | None, tokens: Sequence[int]) -> bytes:
        """A KvBlocksStored of one block."""
        block, message = self.block, self.message
        block.block_hash = block_hash
        ids = block.token_ids
        del ids[:]
        ids.extend(tokens)
        if parent is None:
            message.ClearField("parent_block_hash")
        else:
            message.parent_block_hash = parent
        return message.SerializeToString()


class _Removal:
    """A removal with the same fields beside its hashes."""

    __slots__ = ("message", "table")

    def __init__(self, message: common_pb2.KvBlocksRemoved, table: Tier) -> None:
        self.message = message
        self.table = table


class Normalizer:
    """One rank's events, in order. Keeps what later events depend on: groups, blocks, counters."""

    def __init__(self, rank: int, blocks: Blocks, check: HashCheck | None = None) -> None:
        self.rank = rank
        self.blocks = blocks
        self._check = check
        self.inputs = 0
        """Events seen; they number those that are forwarded."""
        self.forwarded = 0
        self.dropped: Counter[str] = Counter()
        self.groups: dict[int, bool] = {}
        """Whether a KV cache group is one of full attention."""
        self._forms: dict[tuple[Any, ...], _Form | str] = {}
        self._removals: dict[tuple[Any, ...], _Removal | str] = {}
        self._head = common_pb2.KvEventBatch(dp_rank=rank)

    def forget(self) -> None:
        """Another publisher process: nothing it said before holds."""
        self.groups.clear()
        self._forget_forms()

    def _forget_forms(self) -> None:
        self._forms.clear()
        self._removals.clear()

    def batch(self, sequence: int, batch: Batch) -> bytes:
        """A KvEventBatch's bytes; the record of blocks follows."""
        head = self._head
        head.sequence_number, head.timestamp = sequence, batch.timestamp
        parts = [head.SerializeToString()]
        for event in batch.events:
            self.inputs += 1
            made = self._event(event)
            if isinstance(made, str):
                self.dropped[made] += 1
            else:
                parts.append(made)
        self.forwarded += len(parts) - 1
        return b"".join(parts)

    def _event(self, event: Event) -> bytes | str:
        """The event as a batch's field, or why it is not forwarded."""
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
        if self._check is not None:
            self._check.stored(event, hashes)
        keys, tokens, size = event.extra_keys, event.token_ids, event.block_size
        has_keys = keys is not None and any(keys)
        if has_keys or (form.table.namespaces and parent is not None):
            form = self._in_namespace(event, form, parent)
        if len(hashes) == 1 and not has_keys:
            content = form.bytes(hashes[0], parent, tokens)
            form.table.store(hashes[0], content, form.namespace)
            return wire.event(wire.STORED, content, self.inputs)
        if has_keys:
            form = form.copy()
        parts, tail, previous = [], b"", parent
        for at, block_hash in enumerate(hashes):
            if has_keys:
                assert keys is not None
                set_extra_keys(form.block, keys[at] if at < len(keys) else None)
            content = form.bytes(block_hash, previous, tokens[at * size : (at + 1) * size])
            form.table.store(block_hash, content, form.namespace)
            end = end_of_block(content)
            parts.append(content[:end])
            # All else of the event is what its first block has beside it.
            tail = tail or content[end:]
            previous = block_hash
        parts.append(tail)
        return wire.event(wire.STORED, b"".join(parts), self.inputs)

    def _form(self, event: AnyStored, namespace: Namespace | None = None) -> _Form | str:
        """The event's form, or why it is nobody's business.

        :param namespace: another than the event's own.
        """
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
            event.block_size,
            namespace,
        )
        form = self._forms.get(key)
        if form is None:
            form = self._new_form(event, namespace)
            if len(self._forms) >= _MEMO:
                self._forms.clear()
            self._forms[key] = form
        return form

    def _new_form(self, event: AnyStored, namespace: Namespace | None) -> _Form | str:
        tier = self._tier(event)
        if isinstance(tier, str):
            return tier
        if not 0 < event.block_size <= _I32:
            return "unaligned_blocks"
        if namespace is None:
            namespace = (event.lora_name or None, event.cache_salt or None)
        message = common_pb2.KvBlocksStored(
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
        )
        message.blocks.add(
            block_size=event.block_size,
            lora_id=event.lora_id if _is_i64(event.lora_id) else None,
            cache_level=tier - 1 if tier != DEVICE else None,
        )
        return _Form(message, self.blocks.tier(tier), namespace)

    def _in_namespace(self, event: AnyStored, form: _Form, parent: int | None) -> _Form:
        """The event's form with what its first block's extra keys or its parent tell."""
        namespace = self._namespace(event, form.table, parent)
        if namespace == form.namespace:
            return form
        other = self._form(event, namespace)
        assert isinstance(other, _Form)
        return other

    def _removed(self, event: AnyRemoved) -> bytes | str:
        removal = self._removal(event)
        if isinstance(removal, str):
            return removal
        hashes = [fold(value) for value in event.block_hashes]
        if not hashes:
            return "placeholder"
        remove = removal.table.remove
        for block_hash in hashes:
            remove(block_hash)
        message = removal.message
        told = message.block_hashes
        del told[:]
        told.extend(hashes)
        return wire.event(wire.REMOVED, message.SerializeToString(), self.inputs)

    def _removal(self, event: AnyRemoved) -> _Removal | str:
        key = (event.medium, event.locality, event.group_idx, event.ownership)
        removal = self._removals.get(key)
        if removal is None:
            removal = self._new_removal(event)
            if len(self._removals) >= _MEMO:
                self._removals.clear()
            self._removals[key] = removal
        return removal

    def _new_removal(self, event: AnyRemoved) -> _Removal | str:
        tier = self._tier(event)
        if isinstance(tier, str):
            return tier
        message = common_pb2.KvBlocksRemoved(
            tier=tier,  # type: ignore[arg-type]
            medium=event.medium,
            group_idx=_u32(event.group_idx),
            locality=common_pb2.KV_CACHE_LOCALITY_LOCAL,
            ownership=event.ownership,
            cache_level=tier - 1 if tier != DEVICE else None,
        )
        return _Removal(message, self.blocks.tier(tier))

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
                self._forget_forms()  # which were made by what was known of groups before
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


def _shape(hashes: Sequence[int], parent: int | None, event: AnyStored) -> str | None:
    """Why the blocks cannot be told apart or do not fit their tokens."""
    size, tokens = event.block_size, event.token_ids
    if not hashes or not tokens:
        return "placeholder"
    if len(hashes) * size != len(tokens):
        return "unaligned_blocks"
    if parent in hashes or (len(hashes) > 1 and len(set(hashes)) != len(hashes)):
        return "self_referencing_hashes"
    return None


def set_extra_keys(block: common_pb2.KvBlock, keys: Any) -> None:
    """One block's extra keys; shapes that nobody knows are left out."""
    del block.extra_keys[:]
    if not isinstance(keys, (list, tuple)):
        return
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


def _is_i64(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -_I64 - 1 <= value <= _I64


def _is_agent(owner: str | None) -> bool:
    return owner is not None and owner.lower() == AGENT


def _u32(value: int | None) -> int | None:
    return value if value is not None and 0 <= value <= _U32 else None
