"""One real engine for most tests here, and vLLM's own offline answers to hold it against.

An engine takes 3 GB, and two would slow each other down: the offline one has ended when the server
starts, and tests that end their server, or start one of their own, come after all others.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client, connected
from tests.support.kv_workers import Front, working
from tests.support.real_vllm import ENGINE, NAME, VLLM, run_module, serving
from tests.support.router import Router, routing
from tests.support.servers import Server
from tests.support.tiny_vllm import VOCAB

LAST = (
    "test_engine_death.py", "test_kv_restart.py", "test_launch_flags.py", "test_conformance.py",
    "test_embedding.py",
)  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            # The first of them waits for the engine.
            item.add_marker(pytest.mark.timeout(400))
    items.sort(key=lambda item: LAST.index(item.path.name) if item.path.name in LAST else -1)


@pytest.fixture(scope="session")
async def offline(model: Path, home: Path) -> Any:
    """What `LLM.generate` answers to every case; see `tests/support/vllm_oracle.py`."""
    out = home / "offline.json"
    await run_module(home, "tests.support.vllm_oracle", str(model), str(out))
    return json.loads(out.read_text())


@pytest.fixture(scope="session")
async def server(offline: Any, model: Path, home: Path) -> AsyncIterator[Server]:
    async with serving(home, model, "--served-model-name", NAME, *ENGINE) as process:
        yield process


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
