"""vLLM's own publisher class feeds the relay: its frames, its rules for endpoints, its ranks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from smg_grpc_servicer.kv_events.auto import publisher
from smg_grpc_servicer.kv_events.decode import fold
from smg_grpc_servicer.kv_events.endpoints import source
from smg_grpc_servicer.kv_events.hash_check import VARIABLE
from smg_grpc_servicer.kv_events.hash_check import make as make_check
from smg_grpc_servicer.kv_events.history import History
from smg_grpc_servicer.kv_events.record import RankRecord
from tests.support.kv_served import kv_served

# Importing vLLM alone takes 10 to 60 s.
pytestmark = [
    pytest.mark.timeout(240),
    pytest.mark.filterwarnings("default"),  # vLLM's own
]

DIGEST = bytes(range(32))


@pytest.fixture
def publishers() -> Iterator[list[Any]]:
    made: list[Any] = []
    yield made
    for one in made:
        one.shutdown()


def make(config: Any, rank: int) -> Any:
    from vllm.distributed.kv_events import ZmqEventPublisher

    settings = config.config()
    return ZmqEventPublisher(
        rank,
        endpoint=settings["endpoint"],
        replay_endpoint=settings["replay_endpoint"],
        buffer_steps=settings["buffer_steps"],
    )


def batch(*events: Any) -> Any:
    from vllm.distributed.kv_events import KVEventBatch

    return KVEventBatch(ts=1.0, events=list(events))


def stored(block: int | bytes, parent: int | bytes | None = None, **more: Any) -> Any:
    from vllm.distributed.kv_events import MEDIUM_GPU, BlockStored

    return BlockStored(
        block_hashes=[block],
        parent_block_hash=parent,
        token_ids=[1, 2, 3, 4],
        block_size=4,
        lora_id=None,
        medium=MEDIUM_GPU,
        lora_name=None,
        **more,
    )


@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_we_configure_is_heard_from_the_first_batch_on(
    ranks: int, publishers: list[Any]
) -> None:
    """D: over ipc with one rank, over loopback with several; the batches before us included."""
    from vllm.distributed.kv_events import AllBlocksCleared, BlockRemoved

    config = publisher("vllm", ranks, environ={})
    assert config is not None
    publishers += [make(config, rank) for rank in range(ranks)]
    for one in publishers:
        one.publish(batch(stored(2**64 - 1), stored(DIGEST, 2**64 - 1)))
    sources = [source(rank, config.endpoint, config.replay_endpoint) for rank in range(ranks)]
    async with kv_served(sources) as served:
        subscription = served.subscribe()
        first = await subscription.read(ranks)
        assert {b.dp_rank for b in first} == set(range(ranks))
        assert {b.sequence_number for b in first} == {0}
        for one in first:
            blocks = [event.stored.blocks[0] for event in one.events]
            assert [b.block_hash for b in blocks] == [-1, fold(DIGEST)]
            assert one.events[1].stored.parent_block_hash == -1
        for one in publishers:
            one.publish(batch(BlockRemoved(block_hashes=[2**64 - 1], medium="GPU")))
            one.publish(batch(AllBlocksCleared()))
        later = await subscription.read(2 * ranks)
        kinds = {b.events[0].WhichOneof("data") for b in later}
        assert kinds == {"removed", "cleared"}


async def test_fields_of_the_newest_events(publishers: list[Any]) -> None:
    config = publisher("vllm", 1, environ={})
    assert config is not None
    publishers.append(make(config, 0))
    publishers[0].publish(
        batch(
            stored(
                5,
                extra_keys=[("salt", ("image", 3))],
                group_idx=0,
                kv_cache_spec_kind="full_attention",
                locality="LOCAL",
                session_id="s-1",
            ),
            stored(6, group_idx=1, kv_cache_spec_kind="sliding_window"),
        )
    )
    async with kv_served([source(0, config.endpoint, config.replay_endpoint)]) as served:
        (first,) = await served.subscribe().read()
        statistics = served.service.statistics()
    (event,) = first.events
    assert event.stored.cache_salt == "salt"
    assert event.stored.session_id == "s-1"
    text, image = event.stored.blocks[0].extra_keys
    assert text.text == "salt"
    assert (image.multimodal.identifier, image.multimodal.offset) == ("image", 3)
    assert statistics["dropped_non_main_attention_group_total"] == 1


async def test_a_restarted_engine_begins_anew(publishers: list[Any]) -> None:
    """D: the gateway is told DATA_LOSS and rebuilds from the new process's first batch."""
    config = publisher("vllm", 1, environ={})
    assert config is not None
    publishers.append(make(config, 0))
    publishers[0].publish(batch(stored(1)))
    async with kv_served([source(0, config.endpoint, config.replay_endpoint)]) as served:
        subscription = served.subscribe()
        await subscription.read()
        publishers.pop().shutdown()
        publishers.append(make(config, 0))
        publishers[0].publish(batch(stored(2)))
        code, _ = await subscription.end()
        assert code.name == "DATA_LOSS"
        again = served.subscribe()
        (first,) = await again.read()
        assert [e.stored.blocks[0].block_hash for e in first.events] == [2]


def test_the_hash_check_computes_what_vllm_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """`SMG_KV_EVENT_HASH_CHECK`: vLLM's own function and events, its extra keys included."""
    from vllm.utils.hashing import sha256_cbor
    from vllm.v1.core import kv_cache_utils as vllm

    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    vllm.init_none_hash(sha256_cbor)
    keys = [(("cache_salt", "s"), ("mm", "image", -3)), (("prompt_embeds", DIGEST),), None]
    tokens, digests, prior = list(range(100, 112)), [], None
    for at, tagged in enumerate(keys):
        prior = vllm.hash_block_tokens(sha256_cbor, prior, tokens[4 * at : 4 * at + 4], tagged)
        digests.append(prior)
    event = stored(0, extra_keys=vllm.to_event_extra_keys(keys))
    event.block_hashes = [vllm.maybe_convert_block_hash(digest) for digest in digests]
    event.token_ids = tokens
    child = stored(0, event.block_hashes[-1])
    child.block_hashes = [vllm.hash_block_tokens(sha256_cbor, prior, child.token_ids, None)]
    adapter = stored(7)
    adapter.lora_name = "L"

    check = make_check({VARIABLE: "vllm_sha256_cbor"})
    assert check is not None
    record = RankRecord(0, History(), can_replay=False, check=check)
    record.live(0, msgspec.msgpack.encode(batch(event, child, adapter, stored(8))))
    assert record.totals()["forwarded"] == 4
    assert check.totals() == {"hash_checked": 4, "hash_mismatch": 1, "hash_unverifiable": 1}
