"""A client of a served MLX model, and the demo model's text side."""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager
from typing import Any

from smg_grpc_servicer.mlx import demo
from smg_grpc_servicer.testing.dialects import DIALECTS
from tests.support import client
from tests.support.client import Client

__all__ = [
    "END",
    "MLX",
    "VOCAB",
    "Client",
    "chat_prompt",
    "connected",
    "random_prompt",
    "tokenizer",
]

MLX = DIALECTS["mlx"]
VOCAB = 1024
"""Of the demo model and of the random one."""
END = 2
"""The demo model's `<|im_end|>`, which ends an answer."""


def connected(address: str) -> AbstractAsyncContextManager[Client]:
    return client.connected(address, MLX)


def tokenizer() -> Any:
    """The demo model's, by the tokenizers library alone."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(demo.path() / "tokenizer.json"))


def chat_prompt(text: str) -> str:
    """One user message as the demo model's template renders it."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


def random_prompt(length: int, seed: int = 0) -> list[int]:
    """Ids that no other test's prompt begins with, so that no prefix is found for it."""
    import random

    dice = random.Random(f"{length}/{seed}")
    return [dice.randrange(3, VOCAB) for _ in range(length)]
