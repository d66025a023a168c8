from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.kv_events.blocks import Blocks
from smg_grpc_servicer.kv_events.decode import Decoder, fold
from smg_grpc_servicer.kv_events.normalize import Normalizer
from tests.support.kv_publisher import BLOCK, cleared, payload, removed, stored


class Bench:
    """A normalizer with its blocks."""

    def __init__(self) -> None:
        self.blocks = Blocks()
        self.normalizer = Normalizer(2, self.blocks)

    def batch(self, *events: Any, sequence: int = 0) -> common_pb2.KvEventBatch:
        decoded = Decoder().decode(payload(*events, ts=4.5))
        return common_pb2.KvEventBatch.FromString(self.normalizer.batch(sequence, decoded))

    def one(self, event: Any) -> common_pb2.KvBlocksStored:
        (only,) = self.batch(event).events
        return only.stored

    def reason(self, event: Any) -> str:
        """Why it was dropped."""
        self.normalizer.dropped.clear()
        assert not self.batch(event).events
        ((name, count),) = self.normalizer.dropped.items()
        assert count == 1
        return name


@pytest.fixture
def bench() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("value", "folded"),
    [
        (5, 5),
        (2**64 - 1, -1),
        (-3, -3),
        (2**63, -(2**63)),
        (b"\xff" * 32, -1),
        (bytes(24) + b"\x00\x00\x00\x00\x00\x00\x01\x00", 256),
    ],
)
def test_hashes_are_their_low_64_bits_signed(bench: Bench, value: int | bytes, folded: int) -> None:
    event = bench.one({**stored([7]), "parent_block_hash": value})
    assert event.parent_block_hash == folded
    assert fold(value) == folded


def test_a_store_whole(bench: Bench) -> None:
    batch = bench.batch(stored([1, 2], parent=9, lora_id=4), sequence=17)
    assert (batch.sequence_number, batch.timestamp, batch.dp_rank) == (17, 4.5, 2)
    event = batch.events[0].stored
    assert [b.block_hash for b in event.blocks] == [1, 2]
    assert [len(b.token_ids) for b in event.blocks] == [BLOCK, BLOCK]
    assert list(event.blocks[1].token_ids) == [2, 3, 4, 5]
    assert [b.lora_id for b in event.blocks] == [4, 4]
    assert event.parent_block_hash == 9
    assert event.tier == common_pb2.KV_CACHE_TIER_DEVICE
    assert event.medium == "GPU"
    assert event.locality == common_pb2.KV_CACHE_LOCALITY_LOCAL
    assert not event.blocks[0].HasField("cache_level")
    assert not event.HasField("lora_name")


@pytest.mark.parametrize(
    ("medium", "tier", "level"),
    [
        (None, "DEVICE", None),
        ("gpu", "DEVICE", None),
        ("CPU", "HOST", 1),
        ("cpu_pinned", "HOST", 1),
        ("STORAGE", "DISK", 2),
        ("NVMe", "DISK", 2),
        ("EXTERNAL", "EXTERNAL", 3),
    ],
)
def test_mediums_are_tiers(bench: Bench, medium: str | None, tier: str, level: int | None) -> None:
    events = bench.batch(stored([1], medium=medium), removed([1], medium=medium)).events
    wanted = common_pb2.KvCacheTier.Value(f"KV_CACHE_TIER_{tier}")
    block, gone = events[0].stored.blocks[0], events[1].removed
    assert events[0].stored.tier == gone.tier == wanted
    for message in (block, gone):
        assert (message.cache_level if message.HasField("cache_level") else None) == level
    assert bench.blocks.live == 0


@pytest.mark.parametrize(
    ("event", "reason"),
    [
        (stored([1], ownership="KVCR"), "unsupported_ownership"),
        ({**cleared(), "ownership": "kvcr"}, "unsupported_ownership"),
        (stored([1], locality="REMOTE"), "non_local_locality"),
        (removed([1], locality="remote"), "non_local_locality"),
        (stored([1], medium="TAPE"), "unknown_medium"),
        (stored([1], group_idx=1, kv_cache_spec_kind="sliding_window"), "non_main_attention_group"),
        (stored([1], kv_cache_spec_kind="mamba"), "non_main_attention_group"),
        (stored([]), "placeholder"),
        (removed([]), "placeholder"),
        (stored([1], block_size=0), "unaligned_blocks"),
        (stored([1], block_size=2**31), "unaligned_blocks"),
        (stored([1], block_size=3), "unaligned_blocks"),
        (stored([1, 1]), "self_referencing_hashes"),
        (stored([1], parent=1), "self_referencing_hashes"),
        ({"type": "Other"}, "unknown_type"),
        (stored([1], token_ids=None), "malformed"),
    ],
)
def test_what_no_index_should_have_is_dropped_by_name(
    bench: Bench, event: Any, reason: str
) -> None:
    assert bench.reason(event) == reason
    assert bench.blocks.live == 0


def test_events_are_numbered_with_those_that_are_not_forwarded(bench: Bench) -> None:
    events = bench.batch(stored([1]), stored([]), removed([1])).events
    assert [event.event_id for event in events] == [1, 3]


def test_a_group_is_known_by_the_kind_that_was_told_once(bench: Bench) -> None:
    bench.batch(stored([1], group_idx=3, kv_cache_spec_kind="sliding_window"))
    assert bench.reason(removed([1], group_idx=3)) == "non_main_attention_group"
    assert bench.reason(stored([2], group_idx=3)) == "non_main_attention_group"
    assert bench.one(stored([3], group_idx=4)).group_idx == 4
    bench.batch(stored([5], group_idx=3, kv_cache_spec_kind="mla_attention"))
    assert bench.batch(stored([2], group_idx=3)).events
    bench.normalizer.groups[3] = False
    bench.normalizer.forget()
    assert bench.batch(removed([1], group_idx=3)).events


def test_extra_keys_by_their_shape(bench: Bench) -> None:
    keys = [["salt", 7, b"digest", ["image", 3], 2.5, ["a", "b"], 2**63], None]
    first, second = bench.one(stored([1, 2], extra_keys=keys)).blocks
    text, number, blob, image = first.extra_keys
    assert (text.text, number.number, blob.blob) == ("salt", 7, b"digest")
    assert (image.multimodal.identifier, image.multimodal.offset) == ("image", 3)
    assert not second.extra_keys


def test_a_namespace_is_the_events_own_or_the_first_blocks_or_the_parents(bench: Bench) -> None:
    own = bench.one(stored([1], lora_name="L", cache_salt="S"))
    assert (own.lora_name, own.cache_salt) == ("L", "S")
    keys = bench.one(stored([2], lora_name="L", extra_keys=[["L", "T"]]))
    assert (keys.lora_name, keys.cache_salt) == ("L", "T")
    child = bench.one(stored([3], parent=2))
    assert (child.lora_name, child.cache_salt) == ("L", "T")
    bench.batch(removed([2]))
    orphan = bench.one(stored([4], parent=2))
    assert not orphan.HasField("cache_salt")


def test_a_clear_empties_the_record(bench: Bench) -> None:
    bench.batch(stored([1]), stored([2], medium="CPU"))
    assert bench.blocks.live == 2
    assert bench.batch(cleared()).events[0].WhichOneof("data") == "cleared"
    assert bench.blocks.live == 0


def test_many_sessions_do_not_pile_up(bench: Bench) -> None:
    for at in range(3000):
        bench.batch(stored([at + 1], session_id=f"s-{at}"))
    assert len(bench.normalizer._forms) <= 1024
