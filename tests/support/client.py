"""A client of a served engine, in any of the protos."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import count
from time import monotonic
from typing import Any

import grpc

from smg_grpc_servicer.testing.dialects import Dialect
from smg_grpc_servicer.testing.history import History

_serial = count(1)


class Client:
    """One connection; requests get an id of their own unless they bring one."""

    def __init__(self, channel: grpc.aio.Channel, dialect: Dialect) -> None:
        self.channel = channel
        self.dialect = dialect
        self.stub = dialect.stub(channel)
        self.pb = dialect.pb

    def request(self, prompt: Sequence[int], request_id: str | None = None, **options: Any) -> Any:
        """Greedy, streamed, and without an end of text unless `options` say otherwise."""
        if "max_tokens" in options:
            options.setdefault("ignore_eos", True)
        return self.dialect.generate(request_id or f"t-{next(_serial)}", prompt, **options)

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
async def connected(address: str, dialect: Dialect) -> AsyncIterator[Client]:
    async with grpc.aio.insecure_channel(address) as channel:
        yield Client(channel, dialect)
