"""TokenSpeed's own publisher class feeds the relay: its arrays, its short replies, its ranks."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.kv_events.auto import publisher
from smg_grpc_servicer.kv_events.endpoints import source
from tests.support.kv_served import kv_served
from tests.support.tokenspeed_wheel import publisher_module
from tests.support.wait import until

Make = Callable[..., Any]


@pytest.fixture
def make() -> Iterator[Make]:
    """A publisher as its event loop makes one: from what `--kv-events-config` says."""
    made: list[Any] = []

    def publishing(config: Any, rank: int = 0) -> Any:
        text = json.dumps(config.config())
        made.append(publisher_module().EventPublisherFactory.create(text, attn_dp_rank=rank))
        return made[-1]

    yield publishing
    for one in made:
        if one._running:
            one.shutdown()


def ours(ranks: int) -> Any:
    config = publisher("tokenspeed", ranks, environ={})
    assert config is not None
    return config


def batch(*events: Any) -> Any:
    """The scheduler's events as its event loop sends them."""
    module = publisher_module()
    return module.KVEventBatch(ts=1.0, events=module.scheduler_kv_events_to_wire_events(events))


def stored(hashes: list[int], parent: int | None = None) -> Any:
    return SimpleNamespace(
        kind="BlockStored",
        block_hashes=hashes,
        parent_block_hash=parent,
        token_ids=[abs(block) % 1000 + at for block in hashes for at in range(4)],
        block_size=4,
    )


def removed(*hashes: int) -> Any:
    return SimpleNamespace(kind="BlockRemoved", block_hashes=list(hashes))


@pytest.mark.parametrize("ranks", [1, 2])
async def test_what_we_configure_is_heard_from_the_first_batch_on(ranks: int, make: Make) -> None:
    """J1: over ipc with one rank, over loopback with several; the batches before us included."""
    config = ours(ranks)
    publishers = [make(config, rank) for rank in range(ranks)]
    for one in publishers:
        one.publish(batch(stored([2**64 - 1, 7]), stored([9], parent=7)))
    sources = [source(rank, config.endpoint, config.replay_endpoint) for rank in range(ranks)]
    async with kv_served(sources) as served:
        subscription = served.subscribe()
        first = await subscription.read(ranks)
        assert {(b.dp_rank, b.sequence_number) for b in first} == {(n, 0) for n in range(ranks)}
        for told in first:
            chain, child = (event.stored for event in told.events)
            assert [b.block_hash for b in chain.blocks] == [-1, 7]
            assert list(chain.blocks[1].token_ids) == [7, 8, 9, 10]
            assert not chain.HasField("parent_block_hash")
            assert child.parent_block_hash == 7
        for one in publishers:
            one.publish(batch(removed(7, 9)))
        for told in await subscription.read(ranks):
            assert list(told.events[0].removed.block_hashes) == [7, 9]
        for rank in range(ranks):
            assert {h for _, h in subscription.indexes[rank].blocks} == {-1}


async def test_a_cursor_older_than_our_history_is_served_from_its_buffer(make: Make) -> None:
    """J1: its replies have a frame less than vLLM's."""
    config = ours(1)
    engine = make(config)
    for block in range(1, 9):
        engine.publish(batch(stored([block])))
    async with kv_served([source(0, config.endpoint, config.replay_endpoint)], batches=2) as served:
        await until(lambda: served.relay.histories[0].view().last == 7)
        read = await served.subscribe(2).read(5)
        assert [b.sequence_number for b in read] == [3, 4, 5, 6, 7]


async def test_a_restarted_engine_begins_anew(make: Make) -> None:
    """J2: DATA_LOSS, then the new process's blocks from its first batch on, and only those."""
    config = ours(1)
    old = make(config)
    old.publish(batch(stored([1])))
    async with kv_served([source(0, config.endpoint, config.replay_endpoint)]) as served:
        subscription = served.subscribe()
        await subscription.read()
        old.shutdown()
        new = make(config)
        for block in (2, 3, 4):
            new.publish(batch(stored([block])))
        code, _ = await subscription.end()
        assert code.name == "DATA_LOSS"
        again = served.subscribe()
        await again.read(3)
        assert {h for _, h in again.index.blocks} == {2, 3, 4}
