"""The engine is killed and started again behind the router, which goes by its new events."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

from tests.support.client import Client, connected
from tests.support.kv_workers import Front
from tests.support.real_vllm import ENGINE, NAME, VLLM, engine_core, serving
from tests.support.servers import Server
from tests.support.tiny_vllm import text_of


async def test_a_killed_engine_is_resynced(
    front: Front, server: Server, client: Client, model: Path, home: Path, words: Any
) -> None:
    """J1, J2: the router's index has nothing of the dead engine left, and has the new one's."""
    lost, fresh = text_of(1, 500), text_of(4, 500)
    if server.running:  # else another test has killed it
        await client.ids(words.encode(lost).ids, max_tokens=1)
        await front.always(lost, other=False)
        os.kill(engine_core(server), signal.SIGKILL)
    assert await server.exit_code(30) == 1
    port = server.address.rpartition(":")[2]
    flags = ("--served-model-name", NAME, *ENGINE, "--port", port)
    async with serving(home, model, *flags), connected(server.address, VLLM) as again:
        info = await again.stub.GetServerInfo(VLLM.pb.GetServerInfoRequest())
        # One block less than the dead engine had, which would win if it were still known.
        ids = words.encode(lost).ids
        front.other.holds(ids[: len(ids) - info.block_size], info.block_size, 5000)
        await again.ids(words.encode(fresh).ids, max_tokens=1)
        await front.always(fresh, other=False)
        await front.always(lost, other=True)
