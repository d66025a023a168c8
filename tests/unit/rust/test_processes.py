"""Who belongs to the engine, whether it works, and that nobody else is ended."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from smg_grpc_servicer.rust import processes
from smg_grpc_servicer.rust.processes import Family

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")

SLEEP = "import sys, time; print(flush=True); sys.stdin.read()"
"""Ends with its standard input."""


@contextmanager
def child(code: str = SLEEP) -> Iterator[subprocess.Popen[str]]:
    """A child that has printed a line."""
    pipe = subprocess.PIPE
    process = subprocess.Popen([sys.executable, "-c", code], stdin=pipe, stdout=pipe, text=True)
    assert process.stdin is not None
    assert process.stdout is not None
    try:
        process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()
        process.stdin.close()
        process.stdout.close()


def wait_for(condition: Callable[[], bool], seconds: float = 5.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_a_process_is_read() -> None:
    found = processes.read(os.getpid())
    assert found is not None
    assert (found.pid, found.parent, found.is_over) == (os.getpid(), os.getppid(), False)
    assert processes.read(2**22 + 1) is None
    assert processes.everybody()[os.getpid()].start == found.start


def test_a_name_may_hold_anything() -> None:
    """prctl(PR_SET_NAME, ") R 1 (")."""
    code = "import ctypes, sys; ctypes.CDLL(None).prctl(15, b') Z 1 ('); print(flush=True); input()"
    with child(code) as process:
        found = processes.read(process.pid)
        assert found is not None
        assert found.parent == os.getpid()
        assert not found.is_over


def test_children_from_before_are_not_the_engine() -> None:
    with child():
        family = Family()
        assert family.look() == 0
        with child() as engine:
            assert family.look() == 1
            family.kill()
            assert engine.wait(5) == -9
        assert family.look() == 0


def test_an_orphan_is_still_known() -> None:
    """Also one in a session of its own that nobody saw while its parent lived."""
    family = Family()
    code = (
        "import subprocess, sys\n"
        "made = subprocess.Popen([sys.executable, '-c', 'input()'], start_new_session=True,"
        " stdin=subprocess.PIPE)\n"
        "print(made.pid, flush=True)\n"
        "import os; os._exit(0)"
    )
    done = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert done.stdout is not None
    orphan = int(done.stdout.readline())
    family.asked_for([done.pid])
    assert done.wait(5) == 0
    done.stdout.close()
    # It ends with its parent's end of the pipe; so it is held in place for a moment.
    os.kill(orphan, 19)
    found = processes.read(orphan)
    assert found is not None
    assert found.parent == os.getpid()
    assert family.look() == 1
    family.kill()
    wait_for(lambda: family.look() == 0)
    # And nobody has to ask for it any more.
    assert processes.read(orphan) is None


def test_a_number_that_is_anothers_by_now() -> None:
    with child() as process:
        found = processes.read(process.pid)
        assert found is not None
        processes.kill(process.pid, found.start + 1)
        assert process.poll() is None
        processes.kill(process.pid, found.start)
        assert process.wait(5) == -9


@pytest.mark.parametrize("pidfd", [True, False])
def test_kill_on_older_kernels(monkeypatch: pytest.MonkeyPatch, pidfd: bool) -> None:
    def absent(pid: int, flags: int = 0) -> int:
        raise OSError(38, "Function not implemented")

    if not pidfd:
        monkeypatch.setattr(os, "pidfd_open", absent)
    with child() as process:
        found = processes.read(process.pid)
        assert found is not None
        processes.kill(process.pid, found.start)
        assert process.wait(5) == -9


IDLE = (
    "import os, threading, time\n"
    "print(flush=True)\n"
    "fd = os.eventfd(0) if hasattr(os, 'eventfd') else -1\n"
    "while True:\n"
    "    time.sleep(0.1)\n"
    "    if fd >= 0: os.eventfd_write(fd, 1); os.eventfd_read(fd)\n"
)
BUSY = "print(flush=True)\nwhile True: pass"
TALKING = (
    "import sys, time\nprint(flush=True)\n"
    "while True: time.sleep(0.1); print('loading weights: 10 of 90', file=sys.stderr, flush=True)"
)


@pytest.mark.parametrize(
    ("code", "works"),
    [(IDLE, False), (BUSY, True), (TALKING, True), (SLEEP, False)],
    ids=["idle", "busy", "talking", "asleep"],
)
def test_progress_is_more_than_being_there(code: str, works: bool) -> None:
    family = Family()
    with child(code):
        time.sleep(0.3)  # what the interpreter's start costs is over
        assert family.progress()
        time.sleep(0.5)
        assert family.progress() is works


def test_a_new_process_is_progress() -> None:
    family = Family()
    assert not family.progress()
    with child():
        assert family.progress()
