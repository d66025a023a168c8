"""An engine's death is noticed within a second, once, and a stop on purpose is none."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.vllm import watch
from smg_grpc_servicer.vllm.watch import EngineWatch, exit_later
from tests.support.wait import until


async def started(llm: Any) -> tuple[EngineWatch, list[str]]:
    deaths: list[str] = []
    watching = EngineWatch(llm, deaths.append)
    watching.start()
    return watching, deaths


async def test_the_end_of_vllms_output_loop_is_heard_at_once() -> None:
    """O2: the engine core's death ends that loop."""
    over = asyncio.Event()
    task = asyncio.ensure_future(over.wait())
    watching, deaths = await started(SimpleNamespace(errored=False, output_handler=task))
    over.set()
    await until(lambda: deaths != [], seconds=0.2)
    assert len(deaths) == 1
    assert watching.statistics() == {"timers": 0}


async def test_a_loop_that_starts_later_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """An AsyncLLM built on no loop makes its output loop with the first request."""
    monkeypatch.setattr(watch, "LOOK_SECONDS", 0.005)
    llm = SimpleNamespace(errored=False, output_handler=None)
    watching, deaths = await started(llm)
    llm.errored = True
    await until(lambda: deaths != [])
    assert len(deaths) == 1
    assert watching.check()
    assert len(deaths) == 1


async def test_a_loop_that_is_cancelled_was_stopped_on_purpose() -> None:
    llm = SimpleNamespace(errored=False, output_handler=None)
    llm.output_handler = asyncio.ensure_future(asyncio.Event().wait())
    watching, deaths = await started(llm)
    llm.output_handler.cancel()
    llm.errored = True
    await until(lambda: watching.statistics() == {"timers": 0})
    assert deaths == []


async def test_it_ends_when_told() -> None:
    llm = SimpleNamespace(errored=False, output_handler=asyncio.ensure_future(asyncio.sleep(0)))
    watching, deaths = await started(llm)
    watching.close()
    llm.errored = True
    await llm.output_handler
    await asyncio.sleep(0)
    assert watching.check()
    assert deaths == []


async def test_no_seconds_leave_the_process_up() -> None:
    assert exit_later(0.0) is None
    timer = exit_later(1000.0)
    assert timer is not None
    timer.cancel()


def test_the_process_ends_with_code_1_whatever_hangs() -> None:
    """O2: an engine that is gone must not leave a server up for ever."""
    code = (
        "import asyncio, threading\n"
        "from smg_grpc_servicer.vllm.watch import exit_later\n"
        "async def main():\n"
        "    threading.Thread(target=threading.Event().wait).start()\n"
        "    print('up')\n"
        "    exit_later(0.01)\n"
        "    await asyncio.Event().wait()\n"
        "asyncio.run(main())\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False
    )
    assert ended.returncode == 1
    assert ended.stdout == "up\n", "what was printed is flushed"


class Core:
    """An engine core's process: a sentinel that becomes readable when it ends."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.sentinel, self._alive = os.pipe()

    def end(self) -> None:
        os.close(self._alive)


def with_cores(*cores: Core) -> tuple[Any, Any]:
    manager = SimpleNamespace(
        processes=list(cores), manager_stopped=threading.Event(), failed_proc_name=None
    )
    engine_core = SimpleNamespace(resources=SimpleNamespace(engine_manager=manager))
    return SimpleNamespace(errored=False, output_handler=None, engine_core=engine_core), manager


@pytest.mark.parametrize("vllm_was_first", [False, True])
async def test_one_of_several_cores_that_ends_is_the_end(vllm_was_first: bool) -> None:
    """vLLM itself says so only when it has taken down the others, seconds later."""
    cores = [Core("EngineCore_DP0"), Core("EngineCore_DP1")]
    llm, manager = with_cores(*cores)
    watching, deaths = await started(llm)
    if vllm_was_first:
        manager.failed_proc_name = "EngineCore_DP1"
        manager.manager_stopped.set()
    cores[1].end()
    await until(lambda: deaths != [], seconds=0.4)
    assert "EngineCore_DP1" in deaths[0]
    cores[0].end()
    await asyncio.sleep(0.05)
    assert len(deaths) == 1
    assert watching.check()


async def test_cores_that_are_told_to_end_are_no_death() -> None:
    core = Core("EngineCore_0")
    llm, manager = with_cores(core)
    watching, deaths = await started(llm)
    manager.manager_stopped.set()
    core.end()
    await asyncio.sleep(0.05)
    assert deaths == []
    watching.close()


async def test_a_closed_watch_looks_at_no_process() -> None:
    core = Core("EngineCore_0")
    llm, _ = with_cores(core)
    watching, deaths = await started(llm)
    watching.close()
    core.end()
    await asyncio.sleep(0.05)
    assert deaths == []
