"""A warm-up through an engine, past the server that is already there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial

import grpc
import pytest

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.metrics import RecordedMetrics
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.testing import FakeEngine
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.fake_engine import CONTEXT, VOCAB, Faults
from smg_grpc_servicer.vllm.servicer import VllmServicerBase
from smg_grpc_servicer.warmup.inside import warm
from smg_grpc_servicer.warmup.plan import Shape, make
from smg_grpc_servicer.warmup.run import Outcome
from tests.support.client import Client, connected
from tests.support.dial import NOT_SERVING, SERVING, check
from tests.support.wait import until

VLLM = DIALECTS["vllm"]
BATCH = 4
PLAN = make("fast", Shape(64, CONTEXT, VOCAB, window=BATCH))


class Warmed(FakeEngine):
    """Counts how often it is told that a warm-up is over."""

    ends = 0

    def warmed(self) -> None:
        self.ends += 1


@asynccontextmanager
async def started(faults: Faults | None = None) -> AsyncIterator[Warmed]:
    engine = Warmed(faults=faults)
    await engine.start()
    yield engine
    await engine.close()


async def test_requests_reach_the_engine_and_it_is_told_of_the_end() -> None:
    async with started() as engine:
        outcome = await warm(engine, PLAN, 30)
    assert outcome.failed == 0
    assert outcome.answered == len(engine.submitted)
    ids = [spec.request_id for spec in engine.submitted]
    assert ids == [f"smg-warmup-{number}" for number in range(len(ids))]
    spec = engine.submitted[-1]
    assert (spec.sampling.temperature, spec.sampling.ignore_eos, spec.stream) == (0.0, True, False)
    assert engine.aborts == []
    assert engine.flushes == 1
    assert engine.ends == 1


async def test_an_answer_that_the_engine_ends_is_a_failure() -> None:
    async with started(Faults(abort_on_its_own_after=0)) as engine:
        outcome = await warm(engine, PLAN, 30)
        assert outcome.ended == "of 3 steps in a row nothing was answered"
    async with started(Faults(refuse=InvalidArgument("prompt", "not for us"))) as engine:
        assert (await warm(engine, PLAN, 30)).answered == 0
    assert engine.ends == 1


async def test_a_budget_that_is_over_leaves_the_engine_nothing_to_do() -> None:
    """The request that was never answered is aborted there, once."""
    engine = Warmed(faults=Faults(mute=True))
    outcome = await warm(engine, PLAN, 0.05)
    assert outcome.ended == "its 0.05 s are over"
    assert engine.aborts == ["smg-warmup-0"]
    assert engine.ends == 1


class Served:
    """A server whose engine is being warmed up, and somebody who dials it."""

    def __init__(
        self,
        engine: Warmed,
        server: GrpcServer,
        metrics: RecordedMetrics,
        client: Client,
        running: asyncio.Task[int],
    ) -> None:
        self.engine = engine
        self.server = server
        self.metrics = metrics
        self.client = client
        self.running = running
        self.outcome: Outcome | None = None


@asynccontextmanager
async def serving(engine: Warmed, seconds: float) -> AsyncIterator[Served]:
    board = StatusBoard()
    metrics = RecordedMetrics("vllm")
    servicer = VllmServicerBase(engine, board, metrics=metrics)
    server = GrpcServer(ServerOptions(drain_seconds=5), board, metrics)
    server.add(partial(VLLM.registrar(), servicer), VLLM.service)
    address = await server.bind()

    async def warm_up() -> None:
        await warm(engine, PLAN, seconds)

    life = Life(engine.start, warm_up, engine.close, servicer.table.cut_all)
    running = asyncio.create_task(server.serve(life))
    async with connected(str(address), VLLM) as client:
        try:
            yield Served(engine, server, metrics, client, running)
        finally:
            server.request_stop("the test is over")
            await running


async def test_nobody_comes_in_under_its_ids() -> None:
    """Readiness and admission are held for everybody, whatever a request calls itself."""
    engine = Warmed(faults=Faults(mute=True))
    async with serving(engine, 600) as served:
        await until(lambda: len(engine.submitted) == 1 + BATCH)
        assert await check(served.client.channel, VLLM.service) == NOT_SERVING
        assert await check(served.client.channel) == SERVING
        for request_id in ("smg-warmup-0", "smg-warmup-1", "smg-warmup-99", "somebody"):
            request = served.client.request([5, 6], max_tokens=1)
            request.request_id = request_id
            history = await served.client.send(request)
            assert history.code is grpc.StatusCode.UNAVAILABLE
        assert len(engine.submitted) == 1 + BATCH
        for call, message in (
            (served.client.stub.GetLoads, served.client.pb.GetLoadsRequest()),
            (served.client.stub.GetModelInfo, served.client.pb.GetModelInfoRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await call(message)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


async def test_it_is_in_no_figure_and_its_ids_are_anybodys_afterwards() -> None:
    engine = Warmed()
    async with serving(engine, 30) as served:
        await until(lambda: served.server.board.ready)
        assert len(engine.submitted) > 10
        assert (served.metrics.prompt_tokens, served.metrics.generated_tokens) == (0, 0)
        refused = served.metrics.finished
        assert not any(reason for reason, _ in refused)
        request = served.client.request([5, 6], max_tokens=3)
        request.request_id = "smg-warmup-0"
        history = await served.client.send(request)
        assert history.code is grpc.StatusCode.OK
        assert served.metrics.generated_tokens == 3


async def test_a_stop_does_not_wait_for_it(caplog: pytest.LogCaptureFixture) -> None:
    """SIGTERM in the middle of a warm-up: the drain is empty, the exit code 0, nothing left."""
    caplog.set_level(logging.INFO)
    engine = Warmed(faults=Faults(mute=True))
    async with serving(engine, 600) as served:
        await until(lambda: len(engine.submitted) == 1 + BATCH)
        served.server.request_stop("SIGTERM")
        assert await asyncio.wait_for(served.running, 5) == 0
    assert sorted(engine.aborts) == [f"smg-warmup-{number}" for number in range(1, 1 + BATCH)]
    assert "state: serving" not in caplog.text


async def test_an_engine_that_dies_of_it_ends_the_server() -> None:
    engine = Warmed(faults=Faults(mute=True))
    async with serving(engine, 600) as served:
        await until(lambda: len(engine.submitted) == 1 + BATCH)
        served.server.board.dead("it broke")
        assert await asyncio.wait_for(served.running, 5) == 1
