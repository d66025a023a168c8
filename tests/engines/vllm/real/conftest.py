"""One real engine for most tests here, and vLLM's own offline answers to hold it against.

An engine takes 3 GB, and two would slow each other down: the offline one has ended when the server
starts, and tests that end their server, or start one of their own, come after all others.
"""

from __future__ import annotations

import os
import signal
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client, connected
from tests.support.kv_workers import Front, working
from tests.support.real_vllm import (
    CONTEXT,
    ENGINE,
    NAME,
    VLLM,
    WARMED,
    engine_core,
    serving,
)
from tests.support.router import Router, routing
from tests.support.servers import Server
from tests.support.tiny_vllm import VOCAB, text_of

LAST = (
    "test_engine_death.py", "test_kv_restart.py", "test_conformance.py", "test_launch_flags.py",
    "test_embedding.py", "test_ranks.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            # The first of them waits for the engine.
            item.add_marker(pytest.mark.timeout(400))
    items.sort(key=lambda item: LAST.index(item.path.name) if item.path.name in LAST else -1)


@pytest.fixture(scope="session")
def offline(said: Any) -> Any:
    """What `LLM.generate` answers to every case."""
    return said["answers"]


@dataclass(frozen=True)
class Warm:
    """A server after its warm-up, and what it told before anybody asked it for work."""

    server: Server
    loads: Any


@pytest.fixture(scope="session")
async def warm(offline: Any, model: Path, home: Path) -> AsyncIterator[Warm]:
    flags = ("--served-model-name", NAME, "--metrics-port", "0", *ENGINE)
    async with serving(home, model, *flags, env=WARMED) as process:
        async with connected(process.address, VLLM) as first:
            loads = await first.stub.GetLoads(first.pb.GetLoadsRequest())
        yield Warm(process, loads)


@pytest.fixture(scope="session")
def server(warm: Warm) -> Server:
    return warm.server


@pytest.fixture(scope="session")
async def client(server: Server) -> AsyncIterator[Client]:
    async with connected(server.address, VLLM) as connection:
        yield connection


@pytest.fixture(scope="session")
async def router(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """In a directory of its own: nothing named like the model lies there."""
    async with routing(tmp_path_factory.mktemp("router"), server.address) as process:
        await process.serves(NAME)
        yield process


@pytest.fixture(scope="session")
async def front(
    server: Server, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Front]:
    """A router over the engine and a worker that has cached whatever a test says."""
    options = ("--policy", "cache_aware", "--health-check-interval-secs", "1")
    folder = tmp_path_factory.mktemp("router")
    async with (
        working(model, served_model_name=NAME, vocab_size=VOCAB) as other,
        routing(folder, server.address, other.address, options=options) as router,
    ):
        await router.serves(NAME)
        await other.subscribed()
        yield Front(router, NAME, other)


LOST = text_of(1, 500)
"""A text that the first engine had cached."""


@pytest.fixture(scope="session")
async def restarted(
    front: Front, server: Server, client: Client, model: Path, home: Path, words: Any
) -> AsyncIterator[Server]:
    """The engine, killed and started again at the same address: with vLLM's own defaults."""
    if server.running:  # else another test has killed it
        await client.ids(words.encode(LOST).ids, max_tokens=1)
        await front.always(LOST, other=False)
        os.kill(engine_core(server), signal.SIGKILL)
    assert await server.exit_code(30) == 1
    port = server.address.rpartition(":")[2]
    flags = ("--served-model-name", NAME, "--max-model-len", str(CONTEXT), "--enforce-eager")
    # vLLM picks bfloat16, whose kernels end by SIGILL in machines that only claim to have AMX.
    async with serving(home, model, *flags, "--dtype", "float32", "--port", port) as process:
        yield process
