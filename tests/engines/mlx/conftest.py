"""Servers for all tests of the served engine: the demo model, and one of noise."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.mlx_client import VOCAB, Client, connected, tokenizer
from tests.support.servers import Server, serving
from tests.support.tiny_mlx import write_tiny_model

CONTEXT = 512


@pytest.fixture(scope="session")
def noise_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model: every seed gives another text, which the trained demo model would not."""
    path = tmp_path_factory.mktemp("noise") / "noise"
    return write_tiny_model(path, vocab=VOCAB, ctx=CONTEXT)


@pytest.fixture(scope="session")
async def demo_server(one_loop: None) -> AsyncIterator[Server]:
    async with serving("--model", "demo") as server:
        yield server


@pytest.fixture(scope="session")
async def noise_server(one_loop: None, noise_path: Path) -> AsyncIterator[Server]:
    async with serving("--model", str(noise_path)) as server:
        yield server


@pytest.fixture(scope="session")
async def demo_client(demo_server: Server) -> AsyncIterator[Client]:
    async with connected(demo_server.address) as client:
        yield client


@pytest.fixture(scope="session")
async def noise_client(noise_server: Server) -> AsyncIterator[Client]:
    async with connected(noise_server.address) as client:
        yield client


@pytest.fixture(scope="session")
def words() -> Any:
    """The demo model's tokenizer."""
    return tokenizer()
