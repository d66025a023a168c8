"""Silence is the engine's only when the engine owes something."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic

import grpc

from smg_grpc_servicer.core.errors import Unavailable
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.fake_engine import FakeEngine, Faults
from smg_grpc_servicer.testing.history import check
from tests.support.serving import served
from tests.support.wait import until

MLX = DIALECTS["mlx"]


def later() -> float:
    """A clock on which every silence is already longer than the rule allows."""
    return monotonic() + 3600


class SlowTokenizer(FakeEngine):
    """Takes as long as the test likes."""

    def __init__(self) -> None:
        super().__init__()
        self.tokenizing = 0
        self.release = asyncio.Event()

    async def tokenize(self, text: str) -> Sequence[int]:
        self.tokenizing += 1
        try:
            await self.release.wait()
        finally:
            self.tokenizing -= 1
        return await super().tokenize(text)

    async def max_text_length(self) -> int | None:
        return 1000


async def test_a_reader_that_does_not_read_is_no_stall() -> None:
    """The engine finished long ago; what waits is the client's own."""
    async with served(MLX, FakeEngine(tokens_per_step=100), clock=later) as server:
        request = MLX.generate("lazy", [5], max_tokens=4000, logprobs=200)
        call = server.stub.Generate(request)
        await until(lambda: server.engine.submitted != [])
        await until(lambda: not server.engine.statistics()["running"])

        assert server.servicer.table.in_flight == 1
        server.board.refresh()
        assert server.board.ready
        call.cancel()
        await until(lambda: server.servicer.table.in_flight == 0)


async def test_a_mute_engine_is_a_stall() -> None:
    """O1: nothing was reported, nothing comes; the same clock, so the tests beside can fail."""
    faults = Faults(mute=True)
    async with served(MLX, FakeEngine(faults=faults), clock=later) as server:
        call = server.stub.Generate(MLX.generate("mute", [5]))
        await until(lambda: server.engine.submitted != [])
        server.board.refresh()
        assert not server.board.ready

        assert "stalled" in server.board.reason
        call.cancel()
        await until(lambda: server.board.ready)


async def test_a_long_tokenization_is_no_stall_and_an_abort_does_not_wait_for_it() -> None:
    """T5: aborted while being prepared: ended as every abort, and never handed to the engine."""
    engine = SlowTokenizer()
    async with served(MLX, engine, clock=later) as server:
        running = asyncio.ensure_future(server.generate("t", prompt=[], text="hello"))
        await until(lambda: engine.tokenizing == 1)
        server.board.refresh()
        assert server.board.ready
        await server.abort("t")
        history = await asyncio.wait_for(running, 1)

        assert check(history) == []
        assert history.complete().finish_reason == "abort"
        assert engine.tokenizing == 0
        assert engine.submitted == []
        assert engine.aborts == []


async def test_a_stopping_server_does_not_wait_for_the_tokenizer() -> None:
    engine = SlowTokenizer()
    async with served(MLX, engine) as server:
        running = asyncio.ensure_future(server.generate("t", prompt=[], text="hello"))
        await until(lambda: engine.tokenizing == 1)
        server.servicer.table.cut_all(Unavailable("the server is stopping"))
        history = await asyncio.wait_for(running, 1)

        assert history.code is grpc.StatusCode.UNAVAILABLE
        assert history.details == "the server is stopping"


async def test_a_text_that_cannot_fit_is_refused_before_it_is_tokenized() -> None:
    engine = SlowTokenizer()
    async with served(MLX, engine) as server:
        history = await server.generate("t", prompt=[], text="x" * 1001)

        assert history.code is grpc.StatusCode.INVALID_ARGUMENT
        assert history.details.startswith("text: 1001 characters")
        assert engine.tokenizing == 0
