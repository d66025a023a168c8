"""A client of a served MLX model, and the demo model's text side."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from time import monotonic
from typing import Any

import grpc

from smg_grpc_servicer.mlx import demo
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.history import History

MLX = DIALECTS["mlx"]
VOCAB = 1024
"""Of the demo model and of the random one."""
END = 2
"""The demo model's `<|im_end|>`, which ends an answer."""

_serial = count(1)


class Client:
    """One connection; requests get an id of their own unless they bring one."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.channel = channel
        self.stub = MLX.stub(channel)
        self.pb = MLX.pb

    def request(self, prompt: Sequence[int], request_id: str | None = None, **options: Any) -> Any:
        """Greedy, streamed, and without an end of text unless `options` say otherwise."""
        if "max_tokens" in options:
            options.setdefault("ignore_eos", True)
        return MLX.generate(request_id or f"t-{next(_serial)}", prompt, **options)

    async def send(self, request: Any) -> History:
        """The whole stream of a request."""
        return await History(stream=request.stream).record(self.stub.Generate(request))

    async def generate(self, prompt: Sequence[int], **options: Any) -> History:
        return await self.send(self.request(prompt, **options))

    async def begin(self, prompt: Sequence[int], **options: Any) -> tuple[Any, History]:
        """A call whose first message has come, and its history to go on with."""
        request = self.request(prompt, **options)
        call = self.stub.Generate(request)
        first = await call.__aiter__().__anext__()
        return call, History(stream=request.stream, messages=[first])

    async def ids(self, prompt: Sequence[int], **options: Any) -> list[int]:
        """The output of a request that must go well."""
        history = await self.generate(prompt, **options)
        assert history.code is grpc.StatusCode.OK, history.details
        return list(history.complete().output_ids)

    async def active(self) -> int:
        info = await self.stub.GetServerInfo(self.pb.GetServerInfoRequest(), timeout=5)
        return int(info.active_requests)

    async def until_active(self, number: int, seconds: float = 5.0) -> float:
        """Ask until exactly that many requests are in flight; how long it took in seconds."""
        start = monotonic()
        while (seen := await self.active()) != number:
            assert monotonic() - start < seconds, f"{seen} in flight instead of {number}"
        return monotonic() - start

    async def together(self, requests: Sequence[Any]) -> list[History]:
        return list(await asyncio.gather(*map(self.send, requests)))


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Client(channel)


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
