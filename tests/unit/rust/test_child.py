"""An engine in a child of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from smg_grpc_servicer.rust import child, processes
from tests.support.processes import exists
from tests.support.wait import until


def report(path: str, code: int | None) -> int | None:
    """Run in the child."""
    guard = processes.read(os.getppid())
    assert guard is not None
    lines = [str(guard.parent), str(os.getsid(0) == guard.pid), os.environ.get("SMG_TEST", "-")]
    Path(path).write_text("\n".join([*lines, sys.stdin.read()]))
    return code


def end(process: object) -> int:
    assert isinstance(process, subprocess.Popen)
    return process.wait(20)


def test_what_it_is_given(tmp_path: Path) -> None:
    """Our arguments and module path, a session led by its guard, nothing on standard input."""
    path = tmp_path / "told"
    process = child.start(report, str(path), 3, env={**os.environ, "SMG_TEST": "x"})
    assert end(process) == 3
    assert path.read_text().split("\n") == [str(os.getpid()), "True", "x", ""]


def test_none_is_success(tmp_path: Path) -> None:
    assert end(child.start(report, str(tmp_path / "told"), None)) == 0


def test_it_does_not_outlive_a_parent_that_is_gone_already(tmp_path: Path) -> None:
    """Killed between the fork and the child's request to be told."""
    done = subprocess.run(
        [sys.executable, "-m", child.__name__, "1", "0.1"],
        stdin=subprocess.DEVNULL,
        timeout=20,
        check=False,
    )
    assert done.returncode == 1


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGABRT])
def test_a_signal_is_told_as_one(number: signal.Signals) -> None:
    """Which its guard has blocked, or would dump a core of its own for."""
    assert end(child.start(signal.raise_signal, number)) == -number


STARTED = """
import signal, sys
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
from smg_grpc_servicer.rust import child
sys.exit(child.start(sys.exit, 7).wait(20))
"""


def test_its_end_is_heard_of_whoever_started_us() -> None:
    """Under a parent that ignores SIGCHLD the kernel tells nobody that an engine has ended."""
    assert subprocess.run([sys.executable, "-c", STARTED], timeout=30, check=False).returncode == 7


def wait_for_signal(path: str) -> None:
    """Run in the child: until SIGTERM; what it has blocked."""
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(5))
    Path(path).write_text(str(len(signal.pthread_sigmask(signal.SIG_BLOCK, ()))))
    signal.pause()


async def test_a_request_to_end_is_passed_on(tmp_path: Path) -> None:
    """And nothing that the guard waits for is blocked in its engine."""
    path = tmp_path / "blocked"
    process = child.start(wait_for_signal, str(path))
    await until(lambda: path.exists() and path.read_text() != "", 20)
    process.terminate()
    assert end(process) == 5
    assert path.read_text() == "0"


def start_helper(path: str) -> None:
    """Run in the child: leaves a process in a session of its own."""
    sleep = [sys.executable, "-c", "import time; time.sleep(60)"]
    helper = subprocess.Popen(sleep, start_new_session=True)
    Path(path).write_text(str(helper.pid))


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
def test_what_an_engine_leaves_is_gone_when_its_end_is_told(tmp_path: Path) -> None:
    """Whoever is told may be killed in that very moment."""
    path = tmp_path / "helper"
    assert end(child.start(start_helper, str(path))) == 0
    assert not exists(int(path.read_text()))
