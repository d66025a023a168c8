"""Texts are tokenized one at a time, beside the loop, and keep nobody alive."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading

import pytest

from smg_grpc_servicer.core import texts
from smg_grpc_servicer.core.errors import Exhausted, Unavailable
from smg_grpc_servicer.core.texts import TextQueue
from tests.support.wait import until


async def test_one_at_a_time_in_order_on_its_thread() -> None:
    queue = TextQueue("tokens")
    seen: list[tuple[int, str]] = []

    def call(at: int) -> list[int]:
        seen.append((at, threading.current_thread().name))
        return [at]

    answers = await asyncio.gather(*(queue.tokenize(lambda at=at: call(at)) for at in range(5)))  # type: ignore[misc]
    assert answers == [[at] for at in range(5)]
    assert seen == [(at, "tokens") for at in range(5)]
    assert queue.waiting == 0
    queue.close()


async def test_an_error_is_its_callers_alone() -> None:
    queue = TextQueue("tokens")
    with pytest.raises(ZeroDivisionError):
        await queue.tokenize(lambda: [1 // 0])
    assert await queue.tokenize(lambda: [1]) == [1]
    queue.close()


async def test_a_caller_that_left_is_passed_over() -> None:
    queue = TextQueue("tokens")
    go, begun = threading.Event(), threading.Event()
    ran: list[str] = []

    def first() -> list[int]:
        begun.set()
        go.wait(10)
        return [1]

    def second() -> list[int]:
        ran.append("second")
        return [2]

    one = asyncio.ensure_future(queue.tokenize(first))
    two = asyncio.ensure_future(queue.tokenize(second))
    three = asyncio.ensure_future(queue.tokenize(lambda: [3]))
    await until(begun.is_set)
    one.cancel()
    two.cancel()
    await until(lambda: queue.waiting == 1)
    go.set()
    assert await three == [3]
    assert ran == []
    queue.close()


async def test_too_many_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(texts, "MAX_WAITING", 2)
    queue = TextQueue("tokens")
    go = threading.Event()

    def held() -> list[int]:
        go.wait(10)
        return [1]

    waiting = [asyncio.ensure_future(queue.tokenize(held)) for _ in range(2)]
    await until(lambda: queue.waiting == 2)
    with pytest.raises(Exhausted, match="2 texts wait to be tokenized"):
        await queue.tokenize(held)
    go.set()
    assert await asyncio.gather(*waiting) == [[1], [1]]
    queue.close()


async def test_closing_gives_up_what_waits() -> None:
    queue = TextQueue("tokens")
    go, begun = threading.Event(), threading.Event()

    def held() -> list[int]:
        begun.set()
        go.wait(10)
        return [1]

    running = asyncio.ensure_future(queue.tokenize(held))
    waiting = asyncio.ensure_future(queue.tokenize(lambda: [2]))
    await until(begun.is_set)
    queue.close()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    go.set()
    assert await running == [1]
    with pytest.raises(Unavailable):
        await queue.tokenize(lambda: [3])


def test_a_process_does_not_wait_for_a_text() -> None:
    """A stop beside a long text lasted until a guard ended the process with code 1."""
    program = """
import asyncio, sys, time
from smg_grpc_servicer.core.texts import TextQueue
async def main():
    queue = TextQueue("tokens")
    asyncio.ensure_future(queue.tokenize(lambda: time.sleep(60)))
    await asyncio.sleep(0.2)
    queue.close()
asyncio.run(main())
"""
    done = subprocess.run([sys.executable, "-c", program], timeout=20, check=False)
    assert done.returncode == 0
