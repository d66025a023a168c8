"""Whose prompts the scheduler may compute together: token ids or input embeddings, not both.

SGLang (0.5.20 to 0.5.23) dies over a prefill batch of both kinds, and batches whatever waits. So
where embeddings are possible at all, a request of one kind waits here until those of the other have
had their first output. First come, first served; requests of one kind go together.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Mapping
from typing import Any

from smg_grpc_servicer.sglang.outputs import Sink


class _Waiter:
    def __init__(self, embeds: bool) -> None:
        self.embeds = embeds
        self.turn: asyncio.Future[None] | None = None


class Turns:
    """Ids that are being computed, and who waits for them. On the event loop only."""

    def __init__(self) -> None:
        self._computing: dict[str, bool] = {}
        """Id to whether it is of embeddings."""
        self._waiting: deque[_Waiter] = deque()

    @property
    def busy(self) -> bool:
        return bool(self._computing)

    async def wait(self, *, embeds: bool) -> None:
        """Until a request of this kind may be sent, at once."""
        if not self._waiting and self._fits(embeds):
            return
        waiter = _Waiter(embeds)
        self._waiting.append(waiter)
        try:
            while self._waiting[0] is not waiter or not self._fits(embeds):
                waiter.turn = asyncio.get_running_loop().create_future()
                await waiter.turn
        finally:
            self._waiting.remove(waiter)
            # Not before this one has begun: its caller goes on without a pause.
            asyncio.get_running_loop().call_soon(self._next)

    def began(self, rid: str, *, embeds: bool) -> None:
        self._computing[rid] = embeds

    def over(self, rid: str) -> None:
        """It had its first output or its end; may come again."""
        if self._computing.pop(rid, None) is not None:
            self._next()

    def _fits(self, embeds: bool) -> bool:
        return all(kind is embeds for kind in self._computing.values())

    def _next(self) -> None:
        if self._waiting:
            first = self._waiting[0]
            if self._fits(first.embeds) and first.turn is not None and not first.turn.done():
                first.turn.set_result(None)

    def statistics(self) -> dict[str, int]:
        return {"computing_prompts": len(self._computing), "waiting_for_turn": len(self._waiting)}


class FirstOutput:
    """A sink that tells when its request's prompt has been computed."""

    __slots__ = ("_sink", "_turns", "rid")

    def __init__(self, rid: str, sink: Sink, turns: Turns) -> None:
        self.rid = rid
        self._sink = sink
        self._turns = turns

    def output(self, batch: Any, at: int) -> None:
        self._turns.over(self.rid)
        self._sink.output(batch, at)

    def aborted(self, reason: Mapping[str, Any] | None) -> None:
        self._sink.aborted(reason)

    def failed(self, error: Exception) -> None:
        self._sink.failed(error)
