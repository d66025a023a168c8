from __future__ import annotations

from typing import Any

import msgspec
import pytest

from smg_grpc_servicer.kv_events.decode import (
    Cleared,
    Decoder,
    Dropped,
    Removed,
    RemovedArray,
    Stored,
    StoredArray,
    Undecodable,
)
from tests.support.kv_publisher import cleared, payload, removed, stored


def decode(*events: Any) -> list[Any]:
    return list(Decoder().decode(payload(*events)).events)


def test_vllms_maps() -> None:
    first, second, third = decode(stored([1], parent=2), removed([1]), cleared())
    assert isinstance(first, Stored)
    assert (first.block_hashes, first.parent_block_hash, first.medium) == ([1], 2, "GPU")
    assert isinstance(second, Removed)
    assert isinstance(third, Cleared)


def test_tokenspeeds_short_arrays() -> None:
    first, second, _ = decode(
        ["BlockStored", [1], None, [5, 6], 2], ["BlockRemoved", [1]], ["AllBlocksCleared"]
    )
    assert isinstance(first, StoredArray)
    assert (first.token_ids, first.block_size, first.cache_salt) == ([5, 6], 2, None)
    assert isinstance(second, RemovedArray)


def test_vllms_legacy_arrays_in_slot_order() -> None:
    slots = [
        "BlockStored",
        [1],
        2,
        [5, 6],
        2,
        None,
        "CPU",
        "a-lora",
        [["salt"]],
        1,
        "full_attention",
    ]
    (event,) = decode(slots)
    assert (event.medium, event.lora_name, event.group_idx) == ("CPU", "a-lora", 1)
    assert event.extra_keys == [["salt"]]


def test_the_form_that_worked_is_tried_first_and_the_other_still_works() -> None:
    decoder = Decoder()
    array, mapped = payload(["BlockRemoved", [1]]), payload(removed([1]))
    for data, kind in ((array, RemovedArray), (mapped, Removed), (array, RemovedArray)):
        assert isinstance(decoder.decode(data).events[0], kind)


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"medium": 7}, "medium"),
        ({"lora_id": "x"}, "lora_id"),
        ({"extra_keys": 3}, "extra_keys"),
        ({"group_idx": True}, "group_idx"),
        ({"parent_block_hash": "x"}, "parent_block_hash"),
    ],
)
def test_an_unreadable_optional_field_is_absent(change: dict[str, Any], field: str) -> None:
    (event,) = decode(stored([1], **change))
    assert isinstance(event, Stored)
    assert getattr(event, field) is None


def test_unknown_keys_are_ignored() -> None:
    (event,) = decode(stored([1], lookahead_token_ids=[1], something=object.__name__))
    assert isinstance(event, Stored)


@pytest.mark.parametrize(
    "event",
    [
        stored([1], block_hashes=None),
        stored([1], block_hashes=[True]),
        stored([1], block_hashes=[b""]),
        stored([1], token_ids="x"),
        stored([1], token_ids=[-1, 2, 3, 4]),
        stored([1], token_ids=[2**32, 2, 3, 4]),
        stored([1], block_size=None),
        stored([1], token_ids=[[1, 2], 3, 4, 5]),
        7,
        [],
        {},
    ],
)
def test_a_store_without_its_mandatory_fields_is_dropped_alone(event: Any) -> None:
    assert decode(event, stored([2]))[0] == Dropped("malformed")
    assert isinstance(decode(event, stored([2]))[1], Stored)


def test_an_event_of_another_kind_is_dropped_by_name() -> None:
    assert decode({"type": "BlockMoved"}, stored([1]))[0] == Dropped("unknown_type")


def test_pairs_of_eagle_are_their_first_tokens() -> None:
    (event,) = decode(stored([1], token_ids=[[1, 2], [2, 3], [3, 4], [4, 5]]))
    assert event.token_ids == [1, 2, 3, 4]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xc1",
        b"\x93\xcb",
        msgspec.msgpack.encode({"ts": 1.0}),
        msgspec.msgpack.encode([1.0]),
        msgspec.msgpack.encode(["now", []]),
        msgspec.msgpack.encode([True, []]),
        msgspec.msgpack.encode([1.0, {}]),
        b"\x91" * 100_000,
        payload(removed([1], block_hashes=[1, None])),
    ],
)
def test_what_nothing_can_be_concluded_from_is_undecodable(data: bytes) -> None:
    """D: a removal that cannot be read would leave its blocks in every index for ever."""
    with pytest.raises(Undecodable):
        Decoder().decode(data)
