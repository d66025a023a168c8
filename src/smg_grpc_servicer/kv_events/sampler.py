"""Reads the engine's loads while anybody subscribes; one reading serves all subscribers."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence

from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.kv_events.loads import Activity, Sample

log = logging.getLogger(__name__)

SECONDS = 0.1
"""Between two readings; a load that moved is told no later."""


class LoadSampler:
    """`samples` by rank, fresh while there are watchers. A rank that cannot be read has none.

    :param read: as GetLoads does.
    :param activity: what the requests in flight tell.
    """

    def __init__(
        self,
        read: Callable[[], Awaitable[Sequence[Load]]],
        activity: Callable[[], Activity],
        *,
        seconds: float = SECONDS,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.samples: Mapping[int, Sample] = {}
        self._read = read
        self._activity = activity
        self._seconds = seconds
        self._clock = clock
        self._watchers: dict[object, Callable[[], None]] = {}
        self._task: asyncio.Task[None] | None = None
        self._failures = 0

    async def watch(self, callback: Callable[[], None]) -> Callable[[], None]:
        """Call `callback` after each reading; returns how to end that. The first is made now."""
        key = object()
        self._watchers[key] = callback
        try:
            await self.refresh()
        except BaseException:
            self._leave(key)
            raise
        if self._watchers and self._task is None:
            self._task = asyncio.create_task(self._run())
        return lambda: self._leave(key)

    async def refresh(self) -> None:
        """Read once. A failure is logged when it begins and when it is over."""
        try:
            loads = await self._read()
            activity = self._activity()
        except Exception as error:
            if not self._failures:
                log.warning("load records are off: the loads cannot be read", exc_info=True)
            else:
                log.debug("the loads still cannot be read: %s", error)
            self._failures += 1
            self.samples = {}
            return
        if self._failures:
            log.info("load records are on again after %d failed readings", self._failures)
            self._failures = 0
        now = self._clock()
        self.samples = {load.rank: Sample(load, now, activity) for load in loads}

    def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            self._task = None

    def statistics(self) -> dict[str, int]:
        return {"load_watchers": len(self._watchers), "load_tasks": int(self._task is not None)}

    async def _run(self) -> None:
        ticks = asyncio.Event()
        loop = asyncio.get_running_loop()
        while True:
            ticks.clear()
            timer = loop.call_later(self._seconds, ticks.set)
            try:
                await ticks.wait()
            finally:
                timer.cancel()
            await self.refresh()
            for callback in tuple(self._watchers.values()):
                callback()

    def _leave(self, key: object) -> None:
        self._watchers.pop(key, None)
        if not self._watchers:
            self.close()
