"""One router over one demo worker, for all tests that leave both as they found them."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import pytest

from tests.support.mlx_client import Client, connected, tokenizer
from tests.support.router import Router, routing
from tests.support.servers import Server, serving

NAME = "demo-model"


@pytest.fixture(scope="session")
async def worker(one_loop: None) -> AsyncIterator[Server]:
    async with serving("--model", "demo", "--served-model-name", NAME) as server:
        yield server


@pytest.fixture(scope="session")
async def router(worker: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """In a directory of its own: nothing named like the model lies there."""
    async with routing(tmp_path_factory.mktemp("router"), worker.address) as process:
        await process.serves(NAME)
        yield process


@pytest.fixture(scope="session")
async def worker_client(worker: Server) -> AsyncIterator[Client]:
    async with connected(worker.address) as client:
        yield client


@pytest.fixture(scope="session")
def words() -> Any:
    """The demo model's tokenizer."""
    return tokenizer()
