"""One tiny random model for all runtime tests."""

from __future__ import annotations

import random
from typing import Any

import pytest

from smg_grpc_servicer.mlx import backend
from tests.support.tiny_mlx import write_tiny_model


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A `LoadedModel`: 2 layers, 512 ids, 1,024 tokens of context."""
    chosen = backend.prepare()
    from smg_grpc_servicer.mlx.model import load

    return load(str(write_tiny_model(tmp_path_factory.mktemp("tiny"))), dtype=chosen.dtype)


@pytest.fixture(scope="session")
def prompts() -> list[list[int]]:
    """20 prompts of 1 to 40 tokens."""
    chooser = random.Random(7)
    return [[chooser.randrange(3, 512) for _ in range(1 + i * 2)] for i in range(20)]
