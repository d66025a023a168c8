"""An engine in a child of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from smg_grpc_servicer.rust import child


def report(path: str, code: int | None) -> int | None:
    """Run in the child."""
    lines = [str(os.getppid()), str(os.getsid(0) == os.getpid()), os.environ.get("SMG_TEST", "-")]
    Path(path).write_text("\n".join([*lines, sys.stdin.read()]))
    return code


def end(process: object) -> int:
    assert isinstance(process, subprocess.Popen)
    return process.wait(20)


def test_what_it_is_given(tmp_path: Path) -> None:
    """Our arguments, our module path, a session of its own and nothing on standard input."""
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


def test_a_signal_is_told_as_one(tmp_path: Path) -> None:
    process = child.start(os.kill, 0, signal.SIGKILL)
    assert end(process) == -signal.SIGKILL
