"""A generation thread that fails: who hears of it, what goes on, and how the process ends."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.mlx import model
from smg_grpc_servicer.mlx.adapter import MlxEngine
from smg_grpc_servicer.mlx.options import MlxOptions
from smg_grpc_servicer.mlx.servicer import MlxEngineServicer
from smg_grpc_servicer.testing.history import check
from tests.support.dial import NOT_SERVING, SERVING, watch
from tests.support.mlx_client import Client, connected, random_prompt
from tests.support.servers import MLX_SERVICE
from tests.support.wait import until


class Faulty:
    """The model with a fault to switch on."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self.error: BaseException | None = None
        self.once = False
        self.raised = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        error = self.error
        if error is not None:
            self.raised += 1
            if self.once:
                self.error = None
            raise error
        return self._inner(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


@dataclass
class Served:
    """A server of this process and a client of it."""

    engine: MlxEngine
    servicer: MlxEngineServicer
    client: Client
    exit: asyncio.Task[int]
    faults: list[Faulty] = field(default_factory=list)
    loaders: list[threading.Thread] = field(default_factory=list)

    @property
    def model(self) -> Faulty:
        (faulty,) = self.faults
        return faulty


@asynccontextmanager
async def served(path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """Ready, with its model wrapped; at the end nothing is in flight."""
    faults: list[Faulty] = []
    loaders: list[threading.Thread] = []
    load = model.load

    def faulty(*args: Any, **kwargs: Any) -> Any:
        loaded = load(*args, **kwargs)
        faults.append(Faulty(loaded.model))
        loaders.append(threading.current_thread())
        return replace(loaded, model=faults[0])

    monkeypatch.setattr(model, "load", faulty)
    board = StatusBoard()
    engine = MlxEngine(MlxOptions(model=str(path)))
    servicer = MlxEngineServicer(engine, board)
    server = GrpcServer(ServerOptions(exit_on_engine_death_seconds=5), board)
    server.add(
        lambda s: mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(servicer, s), MLX_SERVICE
    )
    address = await server.bind()
    life = Life(engine.start, engine.warm_up, engine.close, servicer.table.cut_all)
    running = asyncio.create_task(server.serve(life))
    try:
        await until(lambda: board.ready or running.done(), 40)
        async with connected(str(address)) as client:
            yield Served(engine, servicer, client, running, faults, loaders)
    finally:
        server.request_stop("the test is over")
        await asyncio.wait([running], timeout=20)
        assert running.done()
    assert set(servicer.statistics().values()) == {0}
    assert set(engine.statistics().values()) <= {0}


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_a_dead_generation_thread_is_noticed_at_once(
    noise_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """E5, P2: every stream ends, health turns, new work is refused, the exit code is 1."""
    async with served(noise_path, monkeypatch) as server:
        client = server.client
        answers = watch(client.channel, MLX_SERVICE)
        assert (await answers.read()).status == SERVING
        running = [
            asyncio.ensure_future(client.generate(random_prompt(8, seed=80 + i), max_tokens=400))
            for i in range(4)
        ]
        await client.until_active(4)
        server.model.error = SystemExit("out of its thread")
        histories = await asyncio.gather(*running)
        assert [h.code for h in histories] == [grpc.StatusCode.UNAVAILABLE] * 4
        assert all("engine" in h.details for h in histories)
        assert (await answers.read()).status == NOT_SERVING
        late = await asyncio.wait_for(client.generate([5], max_tokens=1), 5)
        assert late.code is grpc.StatusCode.UNAVAILABLE
        assert await server.exit == 1


async def test_three_lost_steps_in_a_row_end_the_engine(
    noise_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P2: a step that is always lost is not tried for ever: INTERNAL and why, then exit 1."""
    async with served(noise_path, monkeypatch) as server:
        from smg_grpc_servicer.mlx.runtime.steps import Step, StepFailed

        def lost(_step: Step) -> None:
            raise StepFailed(RuntimeError("the device is gone"), recoverable=False)

        monkeypatch.setattr(Step, "read", lost)
        seen = [await server.client.generate([5 + i], max_tokens=4) for i in range(3)]
        assert seen[0].code is grpc.StatusCode.INTERNAL
        assert "the device is gone" in seen[0].details
        late = await server.client.generate([9], max_tokens=4)
        assert late.code is grpc.StatusCode.UNAVAILABLE
        assert await server.exit == 1


async def test_one_failed_step_costs_nobody_a_token(
    noise_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """P3: the step is run again for the rows that did not cause it; the server stays ready."""
    async with served(noise_path, monkeypatch) as server:
        client = server.client
        prompts = [random_prompt(8, seed=90 + i) for i in range(3)]
        alone = [await client.ids(p, max_tokens=120) for p in prompts]
        begun = [await client.begin(p, max_tokens=120) for p in prompts]
        server.model.once = True
        server.model.error = RuntimeError("a hiccup")
        histories = await asyncio.gather(*(history.record(call) for call, history in begun))
        assert server.model.raised == 1
        assert [check(h) for h in histories] == [[]] * 3
        assert [h.streamed_ids() for h in histories] == alone
        assert not server.exit.done()


async def test_the_thread_that_loaded_the_model_is_gone(
    noise_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """U1: mlx leaves its random state on the thread that builds a model, as a Python object.

    A thread that lets go of it while the interpreter closes aborts the process ("terminate called
    without an active exception"), so that thread must end long before the process does.
    """
    async with served(noise_path, monkeypatch) as server:
        (loader,) = server.loaders
        assert loader is not threading.main_thread()
        await until(lambda: not loader.is_alive())
