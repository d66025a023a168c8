"""Control calls to the scheduler: one reply per rank, matched to their call by a tag of ours.

SGLang's replies carry no id, but every reply takes over its request's `http_worker_ipc`, a return
address that means nothing while one process alone talks to the scheduler (0.5.20 to 0.5.23). So
each call sends a tag there: replies of a call that nobody waits for any more are recognised and
dropped, and calls of one kind may overlap.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from functools import cache
from itertools import count
from typing import Any

log = logging.getLogger(__name__)

TAG = "smg-control-"


class _Call:
    __slots__ = ("answer", "replies")

    def __init__(self) -> None:
        self.replies: list[Any] = []
        self.answer: asyncio.Future[list[Any]] = asyncio.get_running_loop().create_future()


class Communicators:
    """The calls under way, by tag."""

    def __init__(self, send: Callable[[Any], None], ranks: int) -> None:
        self._send = send
        self._ranks = ranks
        self._serial = count(1)
        self._calls: dict[str, _Call] = {}
        self._late = 0

    async def call(self, request: Any, seconds: float) -> list[Any]:
        """One reply per rank, as they came.

        :raises asyncio.TimeoutError: a rank did not answer in time.
        """
        tag = f"{TAG}{next(self._serial)}"
        request.http_worker_ipc = tag
        call = self._calls[tag] = _Call()
        try:
            self._send(request)
            return await asyncio.wait_for(call.answer, seconds)
        finally:
            del self._calls[tag]

    def reply(self, message: Any) -> bool:
        """Whether the message was a control reply."""
        tag = getattr(message, "http_worker_ipc", None)
        if tag is None or not tag.startswith(TAG):
            return False
        call = self._calls.get(tag)
        if call is None:
            self._late += 1
            log.debug("a late %s was dropped", type(message).__name__)
            return True
        call.replies.append(message)
        if len(call.replies) == self._ranks and not call.answer.done():
            call.answer.set_result(call.replies)
        return True

    def fail(self, error: Exception) -> None:
        for call in self._calls.values():
            if not call.answer.done():
                call.answer.set_exception(error)

    def statistics(self) -> dict[str, int]:
        return {"control_calls": len(self._calls)}

    @property
    def late(self) -> int:
        """Replies that came after their call was given up."""
        return self._late


@cache
def names() -> Mapping[str, str]:
    """SGLang's own communicators and what answers them."""
    from sglang.srt.managers import tokenizer_control_mixin

    return {
        f"{spec[0]}_communicator": spec[1].__name__
        for spec in tokenizer_control_mixin._COMMUNICATOR_SPECS  # noqa: SLF001 - no other list of them
    }
