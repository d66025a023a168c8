"""Signals to us and the end of processes, told to the loop."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from smg_grpc_servicer.rust import endings
from smg_grpc_servicer.rust.endings import Stop, Watch
from tests.support.wait import until

SLEEP = "import sys; sys.stdin.read()"


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    made = subprocess.Popen([sys.executable, "-c", SLEEP], stdin=subprocess.PIPE)
    yield made
    made.kill()
    made.wait()
    assert made.stdin is not None
    made.stdin.close()


def without_pidfd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "pidfd_open", raising=False)


@pytest.mark.parametrize("pidfd", [True, False])
async def test_an_end_wakes_the_loop(
    monkeypatch: pytest.MonkeyPatch, process: subprocess.Popen[bytes], pidfd: bool
) -> None:
    """Without waiting for the next look, where the kernel can tell."""
    if not pidfd:
        without_pidfd(monkeypatch)
    woken = asyncio.Event()
    watch = Watch([process], woken.set)
    assert watch.ended() is None
    watch.signal(signal.SIGTERM)
    await asyncio.wait_for(woken.wait(), 5)
    assert watch.ended() == f"the engine (pid {process.pid}) was ended by SIGTERM"
    assert watch.codes() == [-signal.SIGTERM]
    watch.signal(signal.SIGKILL)
    watch.close()


async def test_an_end_before_it_is_watched(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    woken = asyncio.Event()
    watch = Watch([process], woken.set)
    assert woken.is_set()
    assert watch.ended() is not None
    watch.close()


def descriptors() -> list[str]:
    return sorted(path.name for path in Path("/dev/fd").iterdir())


async def test_watching_leaves_nothing_open(process: subprocess.Popen[bytes]) -> None:
    before = descriptors()
    watch = Watch([process], lambda: None)
    watch.close()
    assert descriptors() == before


async def test_three_signals(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stop, do not wait, end."""
    left: list[int] = []
    monkeypatch.setattr(endings, "leave", lambda code, last_act: left.append(code))
    before = signal.getsignal(signal.SIGTERM)
    stop = Stop()
    woken = asyncio.Event()
    with stop.heard(woken.set):
        assert not stop.asked()
        for number, (asked, hurry) in {
            signal.SIGTERM: (True, False),
            signal.SIGINT: (True, True),
        }.items():
            os.kill(os.getpid(), number)
            await asyncio.wait_for(woken.wait(), 5)
            woken.clear()
            assert (stop.asked(), stop.hurry) == (asked, hurry)
        assert not left
        os.kill(os.getpid(), signal.SIGTERM)
        await until(lambda: bool(left))
        assert left == [128 + signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) == before


async def test_the_system_never_ends_us_between_two_handlers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Removing the loop's handler puts the system's in its place: a third signal that came in that
    moment ended the server at once and left its engine.
    """
    stop = Stop()
    woken = asyncio.Event()
    set_to: list[object] = []
    stock = signal.signal

    def watched(number: int, handler: Any) -> Any:
        set_to.append(handler)
        return stock(number, handler)

    with stop.heard(woken.set):
        monkeypatch.setattr(signal, "signal", watched)
        for _ in range(2):
            woken.clear()
            os.kill(os.getpid(), signal.SIGTERM)
            await asyncio.wait_for(woken.wait(), 5)
        assert stop.hurry
        assert set_to
        assert not {signal.SIG_DFL, signal.default_int_handler} & set(set_to)
        monkeypatch.undo()
