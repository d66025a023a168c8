"""AsyncLLM brought up on a thread, and taken down at every stage of that."""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import threading
from types import FunctionType, SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.errors import Unavailable
from smg_grpc_servicer.core.requests import RequestTable
from smg_grpc_servicer.testing import FakeEngine
from smg_grpc_servicer.vllm import engine_life
from smg_grpc_servicer.vllm.engine_life import EngineLife, Launcher, LauncherChanged, on_thread
from tests.support.wait import until


class FakeLlm:
    """What of AsyncLLM the life touches."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.output_handler: asyncio.Future[Any] | None = None

    async def get_supported_tasks(self) -> tuple[str, ...]:
        self.calls.append("tasks")
        return ("generate",)

    async def do_log_stats(self) -> None:
        self.calls.append("stats")
        if self.calls.count("stats") == 1:
            raise RuntimeError("no figures yet")

    def shutdown(self) -> None:
        self.calls.append("shutdown")


class FakeServicer:
    def __init__(self) -> None:
        self.engine: Engine = FakeEngine()
        self.table = RequestTable()
        self.closed = False

    async def close(self) -> None:
        self.closed = True


class Load:
    """A load that blocks its thread until it is let go."""

    def __init__(self, error: Exception | None = None) -> None:
        self.llm = FakeLlm()
        self.servicer = FakeServicer()
        self.go = threading.Event()
        self.error = error

    def build(self) -> FakeLlm:
        assert self.go.wait(30)
        if self.error is not None:
            raise self.error
        return self.llm

    def life(self, stats_seconds: float | None = None) -> EngineLife:
        return EngineLife(self.build, lambda llm: self.servicer, stats_seconds=stats_seconds)


async def test_the_loop_runs_while_the_engine_loads() -> None:
    load = Load()
    life = load.life()
    starting = asyncio.create_task(life.start())
    await asyncio.sleep(0)
    assert not starting.done()
    load.go.set()
    await starting
    # A round trip before the servicer is there: vLLM listens to its engine from then on.
    assert load.llm.calls == ["tasks"]
    await life.warm_up()
    ticket = load.servicer.table.admit("one", 1, stream=True)
    life.cut(Unavailable("over"))
    with pytest.raises(Unavailable, match="over"):
        await ticket.mailbox.wait()
    load.servicer.table.release(ticket)
    await life.close()
    assert load.servicer.closed
    assert load.llm.calls == ["tasks", "shutdown"]


async def test_vllm_is_told_to_stop_listening_before_its_engine_ends() -> None:
    """Or it logs a traceback about the death of an engine that was shut down."""
    load = Load()
    load.go.set()
    life = load.life()
    await life.start()
    listening = asyncio.ensure_future(asyncio.Event().wait())
    load.llm.output_handler = listening
    told: list[bool] = []
    load.llm.shutdown = lambda: told.append(listening.cancelled())  # type: ignore[method-assign]
    await life.close()
    assert told == [True]


async def test_the_figures_are_logged_now_and_then(caplog: pytest.LogCaptureFixture) -> None:
    """Also after one time on which vLLM had none."""
    load = Load()
    load.go.set()
    life = load.life(stats_seconds=0.001)
    await life.start()
    await until(lambda: load.llm.calls.count("stats") >= 3)
    await life.close()
    assert caplog.text.count("cannot log the engine's figures") == 1


async def test_a_load_that_fails_tells_why_and_leaves_nothing() -> None:
    load = Load(RuntimeError("no room for the KV cache"))
    load.go.set()
    life = load.life()
    with pytest.raises(RuntimeError, match="no room"):
        await life.start()
    await life.close()
    assert load.llm.calls == []


async def test_an_engine_that_asks_to_exit_is_a_failed_load() -> None:
    def build() -> None:
        raise SystemExit(3)

    with pytest.raises(RuntimeError, match="asked to exit with 3"):
        await asyncio.wrap_future(on_thread(build, "test"))


@pytest.mark.parametrize("late", [True, False], ids=["in time", "never"])
async def test_a_load_nobody_waits_for_is_given_up_and_an_engine_that_still_comes_is_shut_down(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_life, "ABANDON_SECONDS", 5.0 if late else 0.05)
    load = Load()
    ended: list[str] = []

    def terminate() -> None:
        ended.append("terminate")
        if late:
            load.go.set()

    child = SimpleNamespace(terminate=terminate, kill=lambda: ended.append("kill"))
    monkeypatch.setattr(multiprocessing, "active_children", lambda: [child])
    life = load.life()
    starting = asyncio.create_task(life.start())
    await asyncio.sleep(0)
    starting.cancel()
    await asyncio.wait({starting})
    await life.close()
    assert ended == (["terminate"] if late else ["terminate", "kill"])
    load.go.set()
    await until(lambda: load.llm.calls == ["shutdown"])


def stock(**names: Any) -> FunctionType:
    """A launcher's function whose module has these names."""
    space: dict[str, Any] = {}
    exec("async def serve_grpc(args): pass", space)
    space.update(names)
    function: FunctionType = space["serve_grpc"]
    return function


class EngineArgs:
    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        return cls()

    def create_engine_config(self, usage_context: str) -> str:
        return f"config for {usage_context}"


class Llm:
    @classmethod
    def from_vllm_config(
        cls,
        vllm_config: str,
        usage_context: str,
        enable_log_requests: bool,
        disable_log_stats: bool,
    ) -> tuple[object, ...]:
        return vllm_config, usage_context, enable_log_requests, disable_log_stats


KNOWN = {
    "AsyncEngineArgs": EngineArgs,
    "AsyncLLM": Llm,
    "UsageContext": SimpleNamespace(OPENAI_API_SERVER="openai"),
    "envs": SimpleNamespace(VLLM_LOG_STATS_INTERVAL=10.0),
    "VLLM_VERSION": "0.32.0",
}


@pytest.mark.parametrize("remembers", [True, False])
def test_the_engine_is_built_as_the_launcher_builds_it(remembers: bool) -> None:
    """And vLLM's variables are read once from then on, where it can do that."""
    done: list[str] = []
    more = {"enable_envs_cache": lambda: done.append("remembered")} if remembers else {}
    envs = SimpleNamespace(VLLM_LOG_STATS_INTERVAL=10.0, **more)
    launcher = Launcher.of(stock(**{**KNOWN, "envs": envs}))
    args = argparse.Namespace(enable_log_requests=True, disable_log_stats=False)
    assert launcher.build(args) == ("config for openai", "openai", True, False)
    assert done == ["remembered"] * remembers


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"AsyncLLM": SimpleNamespace(from_vllm_config=lambda vllm_config: None)}, "usage_context"),
        ({"AsyncLLM": object}, "from_vllm_config"),
        ({"UsageContext": SimpleNamespace()}, "OPENAI_API_SERVER"),
        ({"AsyncEngineArgs": SimpleNamespace(from_cli_args=lambda: None)}, "positional"),
    ],
)
def test_a_launcher_that_builds_it_otherwise_is_told(change: dict[str, Any], words: str) -> None:
    with pytest.raises(LauncherChanged, match=words):
        Launcher.of(stock(**{**KNOWN, **change}))


@pytest.mark.parametrize("name", KNOWN)
def test_a_launcher_that_lacks_a_name_is_told(name: str) -> None:
    names = {key: value for key, value in KNOWN.items() if key != name}
    with pytest.raises(LauncherChanged, match=name):
        Launcher.of(stock(**names))
