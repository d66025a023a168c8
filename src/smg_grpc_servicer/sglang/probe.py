"""Whether the scheduler is alive: a one-token request under a reserved id, or anything it says.

A busy scheduler drops the probe and says that it is alive after its next step; either counts.
Callers at the same time share one probe.
"""

from __future__ import annotations

import asyncio
import math
import os
from time import monotonic
from typing import Any

from smg_grpc_servicer.core.errors import DeadlineExceeded
from smg_grpc_servicer.sglang.request_manager import HEALTH_CHECK, RequestManager
from smg_grpc_servicer.sglang.requests import RequestBuilder
from smg_grpc_servicer.sglang.turns import Turns

SECONDS = 20.0
"""How long it may be silent; `SGLANG_HEALTH_CHECK_TIMEOUT` says otherwise."""
FRESH_SECONDS = 1.0
"""What it said so recently needs no question."""


class Probe:
    """See the module."""

    def __init__(
        self,
        manager: RequestManager,
        builder: RequestBuilder,
        turns: Turns | None = None,
        *,
        generation: bool,
    ) -> None:
        self._manager = manager
        self._builder = builder
        self._turns = turns
        self._generation = generation
        self._task: asyncio.Task[None] | None = None
        self._seconds = patience()

    async def check(self) -> None:
        """:raises DeadlineExceeded: not a word from the scheduler."""
        last = self._manager.last_receive
        if last is not None and monotonic() - last < FRESH_SECONDS:
            return
        if self._task is None:
            self._task = asyncio.ensure_future(self._ask())
            self._task.add_done_callback(self._done)
        await asyncio.shield(self._task)

    async def _ask(self) -> None:
        rid = f"{HEALTH_CHECK}_{self._manager.new_id('probe')}"
        request: Any = self._builder.probe(rid, generation=self._generation)
        turns = self._turns
        if turns is None or not turns.busy:
            # While prompts are computed something will be said anyway.
            self._manager.send(request)
            if turns is not None:
                turns.began(rid, embeds=False)
        try:
            await asyncio.wait_for(self._manager.next_push(), self._seconds)
        except asyncio.TimeoutError:
            self._manager.stop(rid)
            raise DeadlineExceeded(
                f"the scheduler has not said anything for {self._seconds:g} s"
            ) from None
        finally:
            if turns is not None:
                turns.over(rid)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._task = None
        if not task.cancelled():
            task.exception()

    async def close(self) -> None:
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)


def patience() -> float:
    """A value that is no positive number counts as not set."""
    try:
        seconds = float(os.environ.get("SGLANG_HEALTH_CHECK_TIMEOUT", ""))
    except ValueError:
        return SECONDS
    return seconds if 0 < seconds < math.inf else SECONDS
