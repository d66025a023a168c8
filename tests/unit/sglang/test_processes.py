"""Processes are started by SGLang's launcher, watched from the first moment, and surely ended.

The launcher here is a stub with real children; the real one is in `tests/engines/sglang/real`.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.sglang import processes
from smg_grpc_servicer.sglang.processes import Ranks, RanksFailed
from tests.support.sglang_config import sglang_config, stub_modules

SPAWN = multiprocessing.get_context("spawn")


class Launcher:
    """SGLang's `Engine` as far as it launches."""

    children = 1

    @classmethod
    def _launch_scheduler_processes(cls, server_args: Any, port_args: Any, main: Any) -> Any:
        processes = [SPAWN.Process(target=time.sleep, args=(60,)) for _ in range(cls.children)]
        for process in processes:
            process.start()
        return None, processes

    @classmethod
    def _launch_detokenizer_subprocesses(cls) -> Any:
        raise AssertionError("a detokenizer is started")

    @classmethod
    def _launch_subprocesses(
        cls,
        server_args: Any,
        init_tokenizer_manager_func: Callable[[Any, Any], Any],
        run_scheduler_process_func: Any,
        run_detokenizer_process_func: Any,
    ) -> Any:
        ports = SimpleNamespace(
            scheduler_input_ipc_name=f"ipc://{server_args.socket}",
            port=1,
            instance_id=server_args.socket.with_name("loads"),
        )
        _, processes = cls._launch_scheduler_processes(server_args, ports, None)
        assert cls._launch_detokenizer_subprocesses() == ([], [])
        manager, _ = init_tokenizer_manager_func(server_args, ports)
        manager.set_startup_time({"load_weight": 1.0})
        manager.max_req_input_len = 7
        pids = [process.pid for process in processes]
        info = SimpleNamespace(scheduler_infos=[{"status": "ready"}], all_child_pids=pids)
        return None, None, ports, info, None, None


def use(monkeypatch: pytest.MonkeyPatch, launcher: type[Launcher]) -> None:
    """Have SGLang launch so."""
    stub_modules(
        monkeypatch,
        runtime_context={"num_dp_ranks_of": lambda config: config.dp_size},
        arg_groups__model_override_base={"resolving_view": lambda args: args},
        entrypoints__engine={"Engine": launcher},
        managers__scheduler={"run_scheduler_process": print},
        managers__load_snapshot={"shm_path_for": str},
    )


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    use(monkeypatch, Launcher)
    monkeypatch.setattr(processes, "LAUNCH_SECONDS", 0.1)
    for name in ("socket", "loads"):
        (tmp_path / name).touch()
    return sglang_config(socket=tmp_path / "socket")


async def test_ready_watched_and_ended(config: Any) -> None:
    reasons: list[str] = []
    ranks = Ranks(config, lambda args, ports: "a front", reasons.append)
    launched = await ranks.start()
    assert launched.front == "a front"
    assert launched.infos == [{"status": "ready"}]
    assert len(ranks.pids) == 1
    await ranks.close()
    assert not multiprocessing.active_children()
    assert reasons == []  # it was asked to
    assert list(config.socket.parent.iterdir()) == []


async def test_a_death_is_told_once_with_its_signal(config: Any) -> None:
    reasons: asyncio.Queue[str] = asyncio.Queue()
    ranks = Ranks(config, lambda args, ports: None, reasons.put_nowait)
    await ranks.start()
    (pid,) = ranks.pids
    start = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    reason = await asyncio.wait_for(reasons.get(), 5)
    assert time.monotonic() - start < 1
    assert reason == f"scheduler process 0 (pid {pid}) was ended by SIGKILL"
    ranks.failed("a signal that comes late")
    await ranks.close()
    assert reasons.empty()


async def test_asked_first(config: Any) -> None:
    ranks = Ranks(config, lambda args, ports: None, lambda reason: None)
    await ranks.start()
    (pid,) = ranks.pids
    asked = []

    def ask() -> None:
        asked.append(pid)
        os.kill(pid, signal.SIGINT)  # blocked, and inherited
        os.kill(pid, signal.SIGTERM)

    await ranks.close(ask)
    assert asked == [pid]
    assert not multiprocessing.active_children()


async def test_a_report_ends_a_start_at_once(config: Any) -> None:
    """A rank's SIGQUIT while the others load; what was started is ended."""
    loading, go_on = threading.Event(), threading.Event()

    def front(args: Any, ports: Any) -> None:
        loading.set()
        go_on.wait(10)

    ranks = Ranks(config, front, lambda reason: None)
    start = asyncio.ensure_future(ranks.start())
    await asyncio.to_thread(loading.wait, 10)
    ranks.failed("a rank reported a failure")
    with pytest.raises(RanksFailed, match="a rank reported a failure"):
        await start
    await ranks.close()
    go_on.set()
    assert not multiprocessing.active_children()


async def test_a_stop_during_the_start_leaves_nothing(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also what would only have been started after it."""
    before, go_on, over = threading.Event(), threading.Event(), threading.Event()

    class Slow(Launcher):
        @classmethod
        def _launch_subprocesses(cls, *args: Any, **options: Any) -> Any:
            before.set()
            go_on.wait(10)
            try:
                return super()._launch_subprocesses(*args, **options)
            finally:
                over.set()

    use(monkeypatch, Slow)
    ranks = Ranks(config, lambda args, ports: None, lambda reason: None)
    start = asyncio.ensure_future(ranks.start())
    await asyncio.to_thread(before.wait, 10)
    start.cancel()
    await ranks.close()
    go_on.set()
    await asyncio.to_thread(over.wait, 10)
    assert not multiprocessing.active_children()


async def test_a_stop_while_processes_are_started_knows_them_all(
    config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It waits for that moment to pass; no socket or file is made after it."""
    spawned, go_on = threading.Event(), threading.Event()
    fronts: list[Any] = []

    class Spawning(Launcher):
        @classmethod
        def _launch_scheduler_processes(cls, *args: Any) -> Any:
            made = super()._launch_scheduler_processes(*args)
            spawned.set()
            go_on.wait(10)
            return made

    use(monkeypatch, Spawning)
    ranks = Ranks(config, lambda args, ports: fronts.append(ports), lambda reason: None)
    start = asyncio.ensure_future(ranks.start())
    await asyncio.to_thread(spawned.wait, 10)
    (child,) = multiprocessing.active_children()
    start.cancel()
    closing = asyncio.ensure_future(ranks.close())
    await asyncio.sleep(0)
    go_on.set()
    await closing
    assert not child.is_alive()
    assert fronts == []
    assert list(config.socket.parent.iterdir()) == []


async def test_the_last_act_leaves_no_file(config: Any) -> None:
    """A second signal, or the exit guard: nothing waits, and still nothing is left."""
    ranks = Ranks(config, lambda args, ports: None, lambda reason: None)
    await ranks.start()
    ranks.kill()
    assert list(config.socket.parent.iterdir()) == []
    await ranks.close()
    assert not multiprocessing.active_children()
