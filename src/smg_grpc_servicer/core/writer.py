"""Runs the coroutine that writes one stream, beside the handler's task.

In a handler's task each message would resume it twice, for the token and when it is written, each
time through the task and every coroutine of grpc.aio below it, and with a future made for the
token. Here the handler sleeps until its stream is over; the writing coroutine is resumed by a call,
when there is something to write (`wake`) and by what it waits for, as a task would do it.
"""

from __future__ import annotations

import asyncio
import types
from collections.abc import Awaitable, Callable, Coroutine, Generator
from typing import Any

import grpc

from smg_grpc_servicer.core.wire import Message

Write = Callable[[Message], Awaitable[None]]
"""Gives a coroutine."""

_IDLE = object()


@types.coroutine
def idle() -> Generator[object, None, None]:
    """In a writing coroutine: wait until `Writer.wake` is called."""
    yield _IDLE


class Writer:
    """Begin with `wake`, which never raises; await `last`; always `close`."""

    __slots__ = ("_idle", "_waits_for", "_writing", "last")

    def __init__(self, writing: Coroutine[Any, Any, Message]) -> None:
        self.last: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        """What `writing` returns or raises: the last message, which is not written. It is cancelled
        when one could not be written: then the call is over."""
        self._writing = writing
        self._idle = True
        self._waits_for: asyncio.Future[Any] | None = None

    def wake(self) -> None:
        """There may be something to write; who is writing already will look for it."""
        if self._idle:
            self._idle = False
            self._go_on()

    def close(self) -> None:
        """Write nothing more."""
        self._idle = False
        self.last.cancel()  # an error that nobody waits for any more is not reported then
        if self._waits_for is not None:
            self._waits_for.remove_done_callback(self._go_on)
            self._waits_for.cancel()
        self._writing.close()

    def _go_on(self, waited_for: asyncio.Future[Any] | None = None) -> None:
        if self.last.done():
            return
        if waited_for is not None and waited_for.cancelled():
            self.last.cancel()
            return
        try:
            waits_for = self._writing.send(None)
        except StopIteration as end:
            self.last.set_result(end.value)
        except grpc.aio.InternalError:
            self.last.cancel()
        except Exception as error:
            self.last.set_exception(error)
        else:
            if waits_for is _IDLE:
                self._idle = True
            elif waits_for is None:  # it only lets others go first
                asyncio.get_running_loop().call_soon(self._go_on)
            else:
                # By this flag a future knows that its await was understood.
                waits_for._asyncio_future_blocking = False  # noqa: SLF001 - made for such as tasks
                waits_for.add_done_callback(self._go_on)
                self._waits_for = waits_for
