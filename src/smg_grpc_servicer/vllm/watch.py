"""Notices that vLLM's engine has died, within a second, and ends a process that nobody else ends.

The end of an engine core's process tells at once: with several ranks vLLM itself first takes down
the others, for up to 5 s in which the requests of the dead one hang and those of the others end as
if they had been aborted. vLLM's output loop ends when the engine is gone; its task tells too. A
slow look at `errored` stands behind both, for versions where they are elsewhere. A loop that was
cancelled, and a process that vLLM was told to end, was shut down on purpose.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
from collections.abc import Callable
from typing import Any

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.5
EXIT_CODE = 1


class EngineWatch:
    """Calls `on_death(reason)` once. Starts on a running loop; `close` ends it."""

    def __init__(self, async_llm: Any, on_death: Callable[[str], None]) -> None:
        self._llm = async_llm
        self._on_death = on_death
        self._loop = asyncio.get_running_loop()
        self._timer: asyncio.TimerHandle | None = None
        self._task: asyncio.Future[Any] | None = None
        self._closed = False
        self._sentinels: list[int] = []

    def start(self) -> None:
        manager = _manager(self._llm)
        for process in getattr(manager, "processes", None) or ():
            self._loop.add_reader(process.sentinel, self._process_ended, manager, process)
            self._sentinels.append(process.sentinel)
        self._look()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.remove_done_callback(self._ended)
        while self._sentinels:
            self._loop.remove_reader(self._sentinels.pop())

    def check(self) -> bool:
        """Whether it is dead, looked at now."""
        if not self._closed and self._llm.errored:
            self._report("the engine core process ended")
        return self._closed

    def statistics(self) -> dict[str, int]:
        return {"timers": int(self._timer is not None)}

    def _look(self) -> None:
        self._timer = None
        # The task is made with the first request when the engine was built on no loop.
        task = getattr(self._llm, "output_handler", None)
        if isinstance(task, asyncio.Future) and task is not self._task:
            self._task = task
            task.add_done_callback(self._ended)
        elif not self._stopped_on_purpose():
            self.check()
        if not self._closed:
            self._timer = self._loop.call_later(LOOK_SECONDS, self._look)

    def _process_ended(self, manager: Any, process: Any) -> None:
        self._sentinels.remove(process.sentinel)
        self._loop.remove_reader(process.sentinel)
        # vLLM's own watcher says both of a process that failed, in this order, and may be quicker.
        stopped = manager.manager_stopped.is_set()
        if not stopped or manager.failed_proc_name is not None:
            self._report(f"the engine core process {process.name} ended (vLLM's log has the cause)")

    def _ended(self, task: asyncio.Future[Any]) -> None:
        if task.cancelled():
            log.debug("vLLM's output loop was stopped")
            self.close()
        elif not self._closed:
            self._report("the engine core process ended (vLLM's log has the cause)")

    def _stopped_on_purpose(self) -> bool:
        return self._task is not None and self._task.cancelled()

    def _report(self, reason: str) -> None:
        self.close()
        self._on_death(reason)


def _manager(async_llm: Any) -> Any:
    """What of vLLM (0.32) has started the engine cores here; None where there is no such thing."""
    manager = async_llm
    for name in ("engine_core", "resources", "engine_manager"):
        manager = getattr(manager, name, None)
    told = ("processes", "manager_stopped", "failed_proc_name")
    return manager if all(hasattr(manager, name) for name in told) else None


def exit_later(seconds: float) -> asyncio.TimerHandle | None:
    """End this process with code 1 in `seconds`; 0 leaves it up."""
    if seconds <= 0:
        return None
    log.error("the process ends in %g s because its engine is dead", seconds)
    return asyncio.get_running_loop().call_later(seconds, _leave)


def _leave() -> None:
    # Not sys.exit: vLLM's child processes and threads could keep the process for ever.
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    os._exit(EXIT_CODE)
