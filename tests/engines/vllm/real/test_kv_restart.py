"""The engine is killed and started again behind the router, which goes by its new events."""

from __future__ import annotations

from typing import Any

from tests.engines.vllm.real.conftest import LOST
from tests.support.client import connected
from tests.support.kv_workers import Front
from tests.support.real_vllm import VLLM
from tests.support.servers import Server
from tests.support.tiny_vllm import text_of


async def test_a_killed_engine_is_resynced(front: Front, restarted: Server, words: Any) -> None:
    """J1, J2: the router's index has nothing of the dead engine left, and has the new one's."""
    fresh = text_of(4, 500)
    async with connected(restarted.address, VLLM) as again:
        info = await again.stub.GetServerInfo(VLLM.pb.GetServerInfoRequest())
        # One block less than the dead engine had, which would win if it were still known.
        ids = words.encode(LOST).ids
        front.other.holds(ids[: len(ids) - info.block_size], info.block_size, 5000)
        await again.ids(words.encode(fresh).ids, max_tokens=1)
        await front.always(fresh, other=False)
        await front.always(LOST, other=True)
