"""A real vLLM engine behind the Rust server: one start for nearly all tests here.

They run after all others, because an engine takes 3 GB, and those that end it come last.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.client import Client, connected
from tests.support.real_vllm import ENGINE, NAME, VLLM, WARMED, serving
from tests.support.router import Router, routing
from tests.support.servers import Server

LAST = ("test_conformance.py", "test_smg_serve.py", "test_newer_wheel.py", "test_ranks.py")
RUST = ("--servicer-impl", "rust", "--drain-seconds", "8")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            # The first of them waits for the engine.
            item.add_marker(pytest.mark.timeout(400))

    def place(item: pytest.Item) -> int:
        if item.path.parent != here:
            return 0
        return 2 + LAST.index(item.path.name) if item.path.name in LAST else 1

    items.sort(key=place)


@pytest.fixture(scope="session")
async def server(model: Path, home: Path) -> AsyncIterator[Server]:
    flags = ("--served-model-name", NAME, *ENGINE, *RUST)
    async with serving(home, model, *flags, env=WARMED) as process:
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
