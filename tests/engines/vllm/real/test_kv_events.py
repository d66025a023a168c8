"""KV events of the real engine, with the publisher that a launch gets by itself."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2

from tests.support.client import Client
from tests.support.kv_served import subscribed
from tests.support.kv_workers import Front
from tests.support.tiny_vllm import text_of

pytestmark = pytest.mark.filterwarnings("default")  # vLLM's own, when it is imported here

PROMPT = [(7 * at) % 400 + 10 for at in range(700)]


def own_hashes(tokens: list[int], size: int) -> list[int]:
    """What vLLM itself makes of the whole blocks of a prompt, as the wire has them."""
    from vllm.utils.hashing import sha256
    from vllm.v1.core import kv_cache_utils

    kv_cache_utils.init_none_hash(sha256)
    hashes, parent = [], None
    for start in range(0, len(tokens) - size + 1, size):
        block = tuple(tokens[start : start + size])
        parent = kv_cache_utils.hash_block_tokens(sha256, parent, block, None)
        hashes.append(int.from_bytes(parent[-8:], "big", signed=True))
    return hashes


async def test_the_index_is_made_of_vllms_own_hashes(client: Client) -> None:
    """D: a request's blocks are told, and another subscriber learns the same from the past."""
    info = await client.stub.GetServerInfo(client.pb.GetServerInfoRequest())
    size = info.block_size
    await client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
    async with subscribed(client.stub) as subscription:
        await subscription.read_load()
        await client.ids(PROMPT, max_tokens=1)
        wanted = own_hashes(PROMPT, size)
        assert wanted
        await subscription.learn(wanted)
        told = {b.block_hash: list(b.token_ids) for b in subscription.stored()}
        for at, block_hash in enumerate(wanted):
            assert told[block_hash] == PROMPT[at * size : (at + 1) * size]

        again = await client.generate(PROMPT, max_tokens=1)
        assert again.complete().cached_tokens == len(wanted) * size

        # A cursor has to differ from 0, which asks for everything.
        await client.ids(PROMPT[1:], max_tokens=1)
        await subscription.learn(own_hashes(PROMPT[1:], size))
        async with subscribed(client.stub) as later:
            while later.index.blocks != subscription.index.blocks:
                await later.read()
            cursor = later.index.cursor
        await client.ids(PROMPT[::-1], max_tokens=1)
        async with subscribed(client.stub, cursor) as resumed:
            (first,) = await resumed.read()
            assert first.sequence_number == cursor + 1


async def test_load_records_tell_of_running_requests(client: Client) -> None:
    async with subscribed(client.stub) as subscription:
        call, _ = await client.begin(PROMPT[:20], max_tokens=900)
        record = await asyncio.wait_for(subscription.running(True), 20)
        call.cancel()
        assert record.engine_reports_steps
        assert record.HasField("engine_silence_ms")
        assert record.engine_silence_ms < 3000
        assert await client.until_active(0) < 5
        await asyncio.wait_for(subscription.running(False), 20)


async def test_the_router_goes_by_the_engines_own_events(
    client: Client, front: Front, words: Any
) -> None:
    """A prompt that the engine has, and the router never saw, goes there; what begins so, too."""
    info = await client.stub.GetServerInfo(client.pb.GetServerInfoRequest())
    mine, others = text_of(1, 500), text_of(2, 500)
    await client.ids(words.encode(mine).ids, max_tokens=1)
    front.other.holds(words.encode(others).ids, info.block_size, 1000)
    await front.always(mine, other=False)
    await front.always(others, other=True)
    await front.always(f"{mine} and more", other=False)
    assert front.other.servicer.cursors == [0]
