"""A stream's messages go out in order, each once, and nothing is left behind."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.core.writer import Write, Writer, idle


class Pen:
    """A `context.write` whose messages wait until they are let through."""

    def __init__(self) -> None:
        self.written: list[str] = []
        self.waiting: list[asyncio.Future[None]] = []
        self.left: list[str] = []
        """Messages that were given up while they waited."""

    async def write(self, message: str) -> None:
        done = asyncio.get_running_loop().create_future()
        self.waiting.append(done)
        try:
            await done
        except BaseException:
            self.left.append(message)
            raise
        self.written.append(message)

    async def let(self, error: BaseException | None = None) -> None:
        done = self.waiting.pop(0)
        if error is None:
            done.set_result(None)
        elif isinstance(error, asyncio.CancelledError):
            done.cancel()
        else:
            done.set_exception(error)
        await asyncio.sleep(0)


class Source:
    """Messages that a test adds to."""

    def __init__(self, *messages: str) -> None:
        self.there = list(messages)
        self.over = False
        self.error: Exception | None = None
        self.closed = False

    async def write(self, write: Write) -> str:
        try:
            while True:
                if self.error is not None:
                    raise self.error
                if self.there:
                    await write(self.there.pop(0))
                elif self.over:
                    return "last"
                else:
                    await idle()
        finally:
            self.closed = True


def writer(source: Source, write: Write) -> Writer:
    made = Writer(source.write(write))
    made.wake()
    return made


async def test_one_message_at_a_time_and_the_last_is_not_written() -> None:
    pen, source = Pen(), Source("a", "b")
    writing = writer(source, pen.write)
    assert len(pen.waiting) == 1
    writing.wake()
    assert len(pen.waiting) == 1, "a message is being written"
    await pen.let()
    assert pen.written == ["a"]
    await pen.let()
    assert not writing.last.done()

    source.there.append("c")
    writing.wake()
    source.over = True
    await pen.let()
    assert pen.written == ["a", "b", "c"]
    assert await writing.last == "last"
    writing.close()
    assert source.closed


async def test_a_write_that_does_not_wait_is_followed_at_once() -> None:
    written: list[str] = []

    async def write(message: str) -> None:
        written.append(message)

    source = Source("a", "b", "c")
    writing = writer(source, write)
    assert written == ["a", "b", "c"]
    source.over = True
    writing.wake()
    assert await writing.last == "last"


async def test_a_write_that_only_lets_others_go_first_goes_on() -> None:
    written: list[str] = []

    async def write(message: str) -> None:
        await asyncio.sleep(0)
        written.append(message)

    source = Source("a")
    writing = writer(source, write)
    writing.wake()
    assert written == []
    await asyncio.sleep(0)
    assert written == ["a"]
    writing.close()


async def test_a_write_may_wait_more_than_once() -> None:
    written: list[str] = []
    steps = [asyncio.get_running_loop().create_future() for _ in range(3)]

    async def write(message: str) -> None:
        for step in steps:
            await step
        written.append(message)

    source = Source("a")
    writing = writer(source, write)
    for step in steps:
        assert not written
        step.set_result(None)
        await asyncio.sleep(0)
    assert written == ["a"]
    writing.close()


@pytest.mark.parametrize("error", [grpc.aio.InternalError("a batch"), asyncio.CancelledError()])
async def test_a_call_that_is_over_ends_like_a_cancelled_one(error: BaseException) -> None:
    """gRPC could not write: nobody is there to be told a status."""
    pen = Pen()
    writing = writer(Source("a", "b"), pen.write)
    await pen.let(error)
    with pytest.raises(asyncio.CancelledError):
        await writing.last
    writing.wake()
    assert pen.waiting == []
    writing.close()


async def test_any_other_error_of_a_write_is_told() -> None:
    pen = Pen()
    writing = writer(Source("a", "b"), pen.write)
    await pen.let(ValueError("no such message"))
    with pytest.raises(ValueError, match="no such message"):
        await writing.last
    assert pen.waiting == []


async def test_an_error_of_the_messages_comes_after_what_is_being_written() -> None:
    pen, source = Pen(), Source("a")
    writing = writer(source, pen.write)
    source.error = RuntimeError("the engine broke")
    writing.wake()
    assert not writing.last.done()
    await pen.let()
    assert pen.written == ["a"]
    with pytest.raises(RuntimeError, match="broke"):
        await writing.last


@pytest.mark.parametrize("cancelled", [False, True])
async def test_closing_gives_up_what_is_being_written(cancelled: bool) -> None:
    """Also when the handler was cancelled and the write is through before it runs again."""
    pen, source = Pen(), Source("a", "b")
    writing = writer(source, pen.write)
    (done,) = pen.waiting
    if cancelled:
        writing.last.cancel()
        await pen.let()
        assert pen.written == []
    writing.close()
    assert pen.left == ["a"]
    assert done.cancelled() or cancelled
    assert source.closed
    writing.wake()
    await asyncio.sleep(0)
    assert pen.written == []
    assert len(pen.waiting) == (0 if cancelled else 1)


async def test_an_error_that_nobody_waits_for_is_not_reported() -> None:
    """A cancellation came in the same turn: no "exception was never retrieved"."""
    seen: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, what: seen.append(what))
    pen, source = Pen(), Source("a")
    writing = writer(source, pen.write)
    source.error = RuntimeError("too late")
    await pen.let()
    assert writing.last.done()
    writing.close()
    del writing, source
    gc.collect()
    assert seen == []
