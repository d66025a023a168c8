"""KV events of the real engine, with the publisher that a launch gets by itself."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from hashlib import sha256
from typing import Any

from smg_grpc_proto.generated import common_pb2

from tests.support.client import Client
from tests.support.kv_served import Subscription
from tests.support.real_sglang import PAGE

PROMPT = [(7 * at) % 400 + 10 for at in range(300)]


@asynccontextmanager
async def subscribed(client: Client, cursor: int = 0) -> AsyncIterator[Subscription]:
    request = common_pb2.SubscribeKvEventsRequest(
        start_sequence_number=cursor, load_records_before_first_batch=True
    )
    subscription = Subscription(client.stub.SubscribeKvEvents(request, timeout=60))
    try:
        yield subscription
    finally:
        subscription.call.cancel()


def own_hashes(tokens: list[int]) -> list[int]:
    """SGLang's chain over whole pages, as the wire has it."""
    hashes, prior = [], b""
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + PAGE])
        prior = sha256(prior + page).digest()
        hashes.append(int.from_bytes(prior[:8], "big", signed=True))
    return hashes


def told(subscription: Subscription) -> dict[int, list[int]]:
    """The tokens of every block that was stored."""
    return {
        block.block_hash: list(block.token_ids)
        for batch in subscription.batches
        for event in batch.events
        for block in event.stored.blocks
    }


async def test_the_index_is_made_of_sglang_s_own_hashes(client: Client) -> None:
    """A request's blocks are told, and another subscriber learns the same from the past."""
    await client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
    async with subscribed(client) as subscription:
        await subscription.read_load()
        await client.ids(PROMPT, max_tokens=1)
        wanted = own_hashes(PROMPT)
        while not {h for _, h in subscription.index.blocks} >= set(wanted):
            await subscription.read()
        stored = told(subscription)
        for at, block_hash in enumerate(wanted):
            assert stored[block_hash] == PROMPT[at * PAGE : (at + 1) * PAGE]

        # A cursor has to differ from 0, which asks for everything.
        await client.ids(PROMPT[1:], max_tokens=1)
        while not {h for _, h in subscription.index.blocks} >= set(own_hashes(PROMPT[1:])):
            await subscription.read()
        async with subscribed(client) as later:
            while later.index.blocks != subscription.index.blocks:
                await later.read()
            cursor = later.index.cursor
        await client.ids(PROMPT[::-1], max_tokens=1)
        async with subscribed(client, cursor) as resumed:
            (first,) = await resumed.read()
            assert first.sequence_number == cursor + 1


async def running(subscription: Subscription, wanted: bool) -> Any:
    """The first record that says so."""
    while True:
        load = (await subscription.read_load()).load
        if bool(load.running_requests) is wanted:
            return load


async def test_load_records_have_the_sections_of_the_reports(client: Client) -> None:
    async with subscribed(client) as subscription:
        call, _ = await client.begin(PROMPT[:20], max_tokens=900)
        record = await asyncio.wait_for(running(subscription, True), 20)
        call.cancel()
        assert record.engine_reports_steps
        assert record.HasField("engine_silence_ms")
        assert record.engine_silence_ms < 3000
        assert record.max_running_requests == 32
        assert record.HasField("memory")
        assert record.HasField("queues")
        assert await client.until_active(0) < 5
        idle = await asyncio.wait_for(running(subscription, False), 20)
        assert idle.HasField("prefill_pending_tokens")
        assert idle.prefill_pending_tokens == 0
