"""Writes the messages of one stream, without a turn of its handler for any of them.

A handler that awaits `context.write` itself is resumed twice a message, once for the token and once
when it is written, and each time through every coroutine of grpc.aio that is below it. Here it
sleeps until the stream is over. A message is made and handed to gRPC when there is something to
write and nothing is being written; what comes meanwhile waits in the mailbox and goes out together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Generator
from typing import Any

import grpc

from smg_grpc_servicer.core.wire import Message

Messages = Generator["Message | None", None, Message]
"""The messages that are there, then None; asked again when there may be more. Returns the last."""
Write = Callable[[Message], Awaitable[None]]
"""A coroutine function."""


class Writer:
    """Begin with `wake`, which never raises; `last` waits for the end; always `close`."""

    __slots__ = ("_messages", "_waits_for", "_write", "_writing", "last")

    def __init__(self, messages: Messages, write: Write) -> None:
        self.last: asyncio.Future[Message] = asyncio.get_running_loop().create_future()
        """The last message, which is not written, once all before it are. Raises what the messages
        raised; is cancelled when one could not be written: then the call is over."""
        self._messages = messages
        self._write = write
        self._writing: Any = None
        """The coroutine of the message that is being written,"""
        self._waits_for: asyncio.Future[Any] | None = None
        """and what it waits for."""

    def wake(self) -> None:
        """There may be something to write."""
        if self._writing is None:
            self._go_on()

    def close(self) -> None:
        """Write nothing more."""
        self.last.cancel()  # an error that nobody waits for any more is not reported then
        self._messages.close()
        if self._waits_for is not None:
            self._waits_for.remove_done_callback(self._go_on)
            self._waits_for.cancel()
        if self._writing is not None:
            self._writing.close()

    def _go_on(self, _: object = None) -> None:
        """Until a write has to wait or nothing is there."""
        if self.last.done():
            return
        try:
            while self._writing is not None or self._begin():
                # What a task does with a coroutine, without a task.
                try:
                    waits_for = self._writing.send(None)
                except StopIteration:
                    self._writing = None
                    continue
                waits_for._asyncio_future_blocking = False  # noqa: SLF001 - for such as tasks
                waits_for.add_done_callback(self._go_on)
                self._waits_for = waits_for
                return
        except grpc.aio.InternalError:
            self._writing = None
            self.last.cancel()
        except Exception as error:
            self._writing = None
            self.last.set_exception(error)

    def _begin(self) -> bool:
        """The next message, when there is one."""
        try:
            message = next(self._messages)
        except StopIteration as end:
            self.last.set_result(end.value)
            return False
        if message is None:
            return False
        self._writing = self._write(message)
        return True
