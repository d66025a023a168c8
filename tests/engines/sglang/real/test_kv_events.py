"""KV events of the real engine, with the publisher that a launch gets by itself."""

from __future__ import annotations

import asyncio
from hashlib import sha256

from smg_grpc_proto.generated import common_pb2

from tests.support.client import Client
from tests.support.kv_served import subscribed
from tests.support.real_sglang import PAGE

PROMPT = [(7 * at) % 400 + 10 for at in range(300)]


def own_hashes(tokens: list[int]) -> list[int]:
    """SGLang's chain over whole pages, as the wire has it."""
    hashes, prior = [], b""
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        page = b"".join(token.to_bytes(4, "little") for token in tokens[start : start + PAGE])
        prior = sha256(prior + page).digest()
        hashes.append(int.from_bytes(prior[:8], "big", signed=True))
    return hashes


async def test_the_index_is_made_of_sglang_s_own_hashes(client: Client) -> None:
    """A request's blocks are told, and another subscriber learns the same from the past."""
    await client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
    async with subscribed(client.stub) as subscription:
        await subscription.read_load()
        await client.ids(PROMPT, max_tokens=1)
        wanted = own_hashes(PROMPT)
        await subscription.learn(wanted)
        told = {b.block_hash: list(b.token_ids) for b in subscription.stored()}
        for at, block_hash in enumerate(wanted):
            assert told[block_hash] == PROMPT[at * PAGE : (at + 1) * PAGE]

        # A cursor has to differ from 0, which asks for everything.
        await client.ids(PROMPT[1:], max_tokens=1)
        await subscription.learn(own_hashes(PROMPT[1:]))
        async with subscribed(client.stub) as later:
            while later.index.blocks != subscription.index.blocks:
                await later.read()
            cursor = later.index.cursor
        await client.ids(PROMPT[::-1], max_tokens=1)
        async with subscribed(client.stub, cursor) as resumed:
            (first,) = await resumed.read()
            assert first.sequence_number == cursor + 1


async def test_load_records_have_the_sections_of_the_reports(client: Client) -> None:
    async with subscribed(client.stub) as subscription:
        call, _ = await client.begin(PROMPT[:20], max_tokens=900)
        record = await asyncio.wait_for(subscription.running(True), 20)
        call.cancel()
        assert record.engine_reports_steps
        assert record.HasField("engine_silence_ms")
        assert record.engine_silence_ms < 3000
        assert record.max_running_requests == 32
        assert record.HasField("memory")
        assert record.HasField("queues")
        assert await client.until_active(0) < 5
        idle = await asyncio.wait_for(subscription.running(False), 20)
        assert idle.HasField("prefill_pending_tokens")
        assert idle.prefill_pending_tokens == 0
