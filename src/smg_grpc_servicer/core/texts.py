"""Text prompts on their way to token ids: one at a time, beside the event loop.

Its thread keeps no process alive: a text of megabytes takes seconds, which no library's call can be
interrupted in. Texts whose caller has left are not begun.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from queue import Empty, SimpleQueue

from smg_grpc_servicer.core.errors import Exhausted, Unavailable

MAX_WAITING = 64
"""Texts at a time; more are refused."""
MAX_TRUNCATED = 4 * 2**20
"""Characters of a text that is to be truncated; it has to be tokenized whole for that."""

Ids = Sequence[int]
_Job = tuple["Future[Ids]", Callable[[], Ids]]


class TextQueue:
    """The one thread: a fast tokenizer does not like to be borrowed twice at a time."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._jobs: SimpleQueue[_Job | None] = SimpleQueue()
        self._thread: threading.Thread | None = None
        self._closed = False
        self.waiting = 0

    async def tokenize(self, call: Callable[[], Ids]) -> Ids:
        """What `call` returns or raises.

        :raises Exhausted: too many wait.
        :raises Unavailable: it is closed.
        """
        if self._closed:
            raise Unavailable("the server is stopping")
        if self.waiting >= MAX_WAITING:
            raise Exhausted(f"{self.waiting} texts wait to be tokenized, the most allowed")
        if self._thread is None:
            self._thread = threading.Thread(target=self._work, name=self._name, daemon=True)
            self._thread.start()
        future: Future[Ids] = Future()
        self.waiting += 1
        try:
            self._jobs.put((future, call))
            return await asyncio.wrap_future(future)
        finally:
            self.waiting -= 1

    def close(self) -> None:
        """Take no more; what waits is given up."""
        self._closed = True
        with contextlib.suppress(Empty):
            while True:
                job = self._jobs.get_nowait()
                if job is not None:
                    job[0].cancel()
        self._jobs.put(None)

    def _work(self) -> None:
        while (job := self._jobs.get()) is not None:
            future, call = job
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(call())
            except Exception as error:
                future.set_exception(error)
            del job, future, call
