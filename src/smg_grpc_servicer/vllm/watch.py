"""Notices that vLLM's engine has died, within a second, and ends a process that nobody else ends.

vLLM's output loop ends when the engine core is gone; its task tells at once. A slow look at
`errored` stands behind it, for versions where the task is elsewhere. A loop that was cancelled was
shut down on purpose.
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

    def start(self) -> None:
        self._look()

    def close(self) -> None:
        self._closed = True
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._task is not None:
            self._task.remove_done_callback(self._ended)

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
