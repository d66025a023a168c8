"""A Generate that runs: read in the background, so that a check can act in its middle."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import grpc

from smg_grpc_servicer.testing.history import History


class Stream:
    """One call and what has come of it so far."""

    def __init__(
        self, request: Any, call: Any, *, pause: Callable[[int], float] | None = None
    ) -> None:
        """`pause(n)` is how long to wait before reading message n: a slow reader."""
        self.request = request
        self.call = call
        self.history = History(stream=request.stream)
        self._pause = pause
        self._news = asyncio.Event()
        self._reader = asyncio.ensure_future(self._read())

    @property
    def ended(self) -> bool:
        return self._reader.done()

    @property
    def tokens(self) -> int:
        """Streamed so far, over all choices."""
        return sum(len(chunk.token_ids) for chunk in self.history.chunks)

    async def until(self, met: Callable[[], bool]) -> bool:
        """Wait until something holds; False when the stream ended first."""
        while not met():
            if self.ended:
                return False
            self._news.clear()
            await self._news.wait()
        return True

    async def first(self) -> bool:
        """Wait for the first message; False when there never was one."""
        return await self.until(lambda: bool(self.history.messages))

    async def end(self) -> History:
        """Wait for the end; a call that was cancelled here has status CANCELLED."""
        await asyncio.wait({self._reader})
        if self._reader.cancelled():
            self.history.code = grpc.StatusCode.CANCELLED
        else:
            self._reader.result()
        return self.history

    async def close(self) -> bool:
        """Cancel it if it still runs; whether it did."""
        running = not self.ended
        self.call.cancel()
        await self.end()
        return running

    async def _read(self) -> None:
        try:
            await self.history.record(self._messages())
        finally:
            self._news.set()

    async def _messages(self) -> AsyncIterator[Any]:
        async for message in self.call:
            if self._pause is not None:
                await asyncio.sleep(self._pause(len(self.history.messages)))
            yield message
            self._news.set()
