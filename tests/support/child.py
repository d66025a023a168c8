"""Starting a server as a child, reading its log, and ending it whatever the test does."""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from time import monotonic
from typing import IO

ROOT = Path(__file__).resolve().parents[2]


class Child:
    """A child process; what it prints is read on a thread, stdout and stderr together."""

    def __init__(self, *arguments: str, module: str, env: Mapping[str, str] | None = None) -> None:
        environment = dict(os.environ, PYTHONUNBUFFERED="1", **(env or {}))
        paths = [str(ROOT), str(ROOT / "src"), environment.get("PYTHONPATH", "")]
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=environment,
            cwd=ROOT,
        )
        self.lines: list[str] = []
        self._queue: queue.Queue[str | None] = queue.Queue()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def wait_for(self, pattern: str, seconds: float = 20.0) -> re.Match[str]:
        """The first match in what it prints from here on."""
        end = monotonic() + seconds
        while True:
            try:
                line = self._queue.get(timeout=max(0.01, end - monotonic()))
            except queue.Empty:
                line = None
            assert line is not None, f"no {pattern!r} in {''.join(self.lines)}"
            found = re.search(pattern, line)
            if found:
                return found

    def address(self) -> str:
        return self.wait_for(r"listening on grpcs?://(\S+)")[1]

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def exit_code(self, seconds: float = 20.0) -> int:
        try:
            code = self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"still running: {''.join(self.lines)}") from None
        # Its last words; who it left behind may hold the pipe open.
        self._reader.join(2)
        return code

    def end(self) -> None:
        """Kill it if it still runs."""
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        self._reader.join(2)

    @property
    def output(self) -> str:
        return "".join(self.lines)

    def _read(self, pipe: IO[str]) -> None:
        with pipe:
            for line in pipe:
                self.lines.append(line)
                self._queue.put(line)
        self._queue.put(None)


@contextmanager
def running(
    *arguments: str,
    module: str = "tests.support.server_child",
    env: Mapping[str, str] | None = None,
) -> Iterator[Child]:
    child = Child("--port", "0", *arguments, module=module, env=env)
    try:
        yield child
    finally:
        child.end()
