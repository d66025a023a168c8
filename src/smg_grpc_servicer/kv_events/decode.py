"""What publishers send: msgpack payloads of vLLM, SGLang and TokenSpeed as typed events.

vLLM (tagged maps; older releases tag-first arrays): vllm/distributed/kv_events.py. SGLang sends
maps, TokenSpeed arrays. A payload of a known form is decoded and checked in C; any other goes
through a lenient reading, event by event: unknown keys are ignored, an unreadable optional field
counts as absent, an unreadable store is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, TypeGuard

import msgspec

Hash = int | Annotated[bytes, msgspec.Meta(min_length=1)]
Token = Annotated[int, msgspec.Meta(ge=0, le=2**32 - 1)]


_I64, _U64 = 2**63 - 1, 2**64 - 1


def fold(value: Hash) -> int:
    """A hash's low 64 bits, signed, as on the wire."""
    if isinstance(value, int):
        if -_I64 <= value <= _I64:
            return value
        value &= _U64
        return value if value <= _I64 else value - _U64 - 1
    return int.from_bytes(value[-8:], "big", signed=True)


class Undecodable(Exception):
    """Nothing may be concluded from this payload, so what it said is lost."""


class Stored(msgspec.Struct, tag="BlockStored", tag_field="type", gc=False, kw_only=True):
    """Blocks that entered a cache. Optional fields are None when not told."""

    block_hashes: list[Hash]
    token_ids: list[Token]
    block_size: int
    parent_block_hash: Hash | None = None
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    cache_salt: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None


class StoredPairs(Stored, tag="BlockStored", tag_field="type", gc=False, kw_only=True):
    """With pairs of a token and its next one for tokens, as SGLang tells them under EAGLE."""

    next_ids: list[Token]


class Removed(msgspec.Struct, tag="BlockRemoved", tag_field="type", gc=False, kw_only=True):
    """Blocks that left a cache."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class Cleared(msgspec.Struct, tag="AllBlocksCleared", tag_field="type", gc=False, kw_only=True):
    """Everything left the cache."""

    ownership: str | None = None


class StoredArray(msgspec.Struct, tag="BlockStored", array_like=True, gc=False):
    """`Stored` in the slot order of tag-first arrays."""

    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[Token]
    block_size: int
    lora_id: int | None = None
    medium: str | None = None
    lora_name: str | None = None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None

    @property
    def cache_salt(self) -> str | None:
        """Arrays have no slot for it."""
        return None


class RemovedArray(msgspec.Struct, tag="BlockRemoved", array_like=True, gc=False):
    """`Removed` as a tag-first array."""

    block_hashes: list[Hash]
    medium: str | None = None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None


class ClearedArray(msgspec.Struct, tag="AllBlocksCleared", array_like=True, gc=False):
    """`Cleared` as a tag-first array."""

    ownership: str | None = None


@dataclass(frozen=True, slots=True)
class Dropped:
    """An event that is not forwarded, and why."""

    reason: str


AnyStored = Stored | StoredArray
AnyRemoved = Removed | RemovedArray
Event = Stored | StoredArray | Removed | RemovedArray | Cleared | ClearedArray | Dropped


class _Maps(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[Stored | Removed | Cleared]


class _Arrays(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]


@dataclass(frozen=True, slots=True)
class Batch:
    """One published batch. The rank it names is not kept: the socket's counts."""

    timestamp: float
    """Seconds, the publisher's clock."""
    events: Sequence[Event]


class Decoder:
    """Decodes one publisher's payloads; tries first what worked last."""

    def __init__(self) -> None:
        self._forms: list[Callable[[bytes], Any]] = [
            msgspec.msgpack.Decoder(_Maps).decode,
            msgspec.msgpack.Decoder(_Arrays).decode,
        ]

    def decode(self, payload: bytes) -> Batch:
        """:raises Undecodable: no batch, or a removal in it cannot be read."""
        for at, decode in enumerate(self._forms):
            try:
                typed = decode(payload)
            except msgspec.MsgspecError:
                continue
            except (ValueError, RecursionError) as error:
                raise Undecodable(str(error)) from error
            if at:
                self._forms.reverse()
            return Batch(typed.ts, typed.events)
        return _lenient(payload)


def _lenient(payload: bytes) -> Batch:
    try:
        raw = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, ValueError, TypeError, RecursionError) as error:
        raise Undecodable(str(error)) from error
    if not isinstance(raw, list) or len(raw) < 2:
        raise Undecodable("no array of a time and events")
    timestamp, events = raw[0], raw[1]
    if isinstance(timestamp, bool) or not isinstance(timestamp, (int, float)):
        raise Undecodable("the batch has no time")
    if not isinstance(events, list):
        raise Undecodable("the batch has no events")
    return Batch(float(timestamp), [_event(event) for event in events])


_SLOTS: Mapping[str, Sequence[str]] = {
    "BlockStored": StoredArray.__struct_fields__,
    "BlockRemoved": RemovedArray.__struct_fields__,
    "AllBlocksCleared": ClearedArray.__struct_fields__,
}


def _event(raw: Any) -> Event:
    fields: Mapping[Any, Any]
    if isinstance(raw, dict):
        kind, fields = raw.get("type"), raw
    elif isinstance(raw, list) and raw:
        kind = raw[0]
        slots = _SLOTS.get(kind, ()) if isinstance(kind, str) else ()
        fields = dict(zip(slots, raw[1:], strict=False))
    else:
        return Dropped("malformed")
    if kind == "BlockStored":
        return _stored(fields)
    if kind == "BlockRemoved":
        return _removed(fields)
    if kind == "AllBlocksCleared":
        return Cleared(ownership=_text(fields.get("ownership")))
    return Dropped("unknown_type" if isinstance(kind, str) else "malformed")


def _stored(fields: Mapping[Any, Any]) -> Event:
    hashes = _hashes(fields.get("block_hashes"))
    tokens, following = _tokens(fields.get("token_ids"))
    size = fields.get("block_size")
    if hashes is None or tokens is None or not _is_int(size):
        return Dropped("malformed")
    parent, keys = fields.get("parent_block_hash"), fields.get("extra_keys")
    others: dict[str, Any] = {name: _text(fields.get(name)) for name in _TEXTS}
    kind: type[Stored] = Stored
    if following is not None:
        kind, others["next_ids"] = StoredPairs, following
    return kind(
        block_hashes=hashes,
        token_ids=tokens,
        block_size=size,
        parent_block_hash=parent if _is_hash(parent) else None,
        lora_id=_int(fields.get("lora_id")),
        extra_keys=keys if isinstance(keys, list) else None,
        group_idx=_int(fields.get("group_idx")),
        kv_cache_spec_sliding_window=_int(fields.get("kv_cache_spec_sliding_window")),
        **others,
    )


_TEXTS = (
    "medium",
    "lora_name",
    "cache_salt",
    "kv_cache_spec_kind",
    "locality",
    "ownership",
    "session_id",
)


def _removed(fields: Mapping[Any, Any]) -> Event:
    hashes = _hashes(fields.get("block_hashes"))
    if hashes is None:
        # A store that is not understood costs a cache hit; a removal that is not would leave
        # blocks in every index for ever.
        raise Undecodable("a removal has unreadable block hashes")
    return Removed(
        block_hashes=hashes,
        medium=_text(fields.get("medium")),
        group_idx=_int(fields.get("group_idx")),
        locality=_text(fields.get("locality")),
        ownership=_text(fields.get("ownership")),
    )


def _hashes(value: Any) -> list[Hash] | None:
    if not isinstance(value, list) or not all(map(_is_hash, value)):
        return None
    return value


def _tokens(value: Any) -> tuple[list[int] | None, list[int] | None]:
    """Token ids; of pairs the first ones, and the second ones beside them."""
    if not isinstance(value, list):
        return None, None
    if value and all(isinstance(cell, list) and len(cell) == 2 for cell in value):
        first, second = ([cell[at] for cell in value] for at in (0, 1))
        return (first, second) if _are_tokens(first) and _are_tokens(second) else (None, None)
    return (value if _are_tokens(value) else None), None


def _are_tokens(value: list[Any]) -> bool:
    return all(_is_int(token) and 0 <= token < 2**32 for token in value)


def _is_hash(value: Any) -> bool:
    return _is_int(value) or (isinstance(value, bytes) and bool(value))


def _is_int(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _int(value: Any) -> int | None:
    return value if _is_int(value) else None


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None
