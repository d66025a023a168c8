"""An engine as a child process that does not outlive us.

    process = start(run_headless, args)

The child is a fresh Python (Rust's threads are in ours, so nothing may be forked) in a session of
its own, so that Ctrl-C in a terminal reaches us alone. It is the engine's guard (`guard`), which
forks the engine before it has any thread. `target` and its arguments are pickled: a function of an
importable module, not of `__main__`.
"""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

from smg_grpc_servicer.rust import guard

GRACE = 15.0
"""Seconds an engine has to end by itself after we are gone."""


def start(
    target: Callable[..., object],
    *arguments: object,
    env: Mapping[str, str] | None = None,
    grace: float = GRACE,
) -> subprocess.Popen[bytes]:
    """Call `target(*arguments)` in a child; its exit code is the int (or None) that comes back.

    Call it on the thread that lives as long as this process: the kernel tells the child of the
    thread's end.
    """
    guard.hear_of_children()
    with tempfile.TemporaryFile() as file:
        # In two parts: the modules of the second are found through the first.
        pickle.dump(sys.path, file)
        pickle.dump((target, arguments), file)
        file.seek(0)
        return subprocess.Popen(
            [sys.executable, "-m", __name__, str(os.getpid()), str(grace)],
            stdin=file,
            env=None if env is None else dict(env),
            start_new_session=True,
        )


def main() -> int:
    """The child's side."""
    guard.fork(int(sys.argv[1]), float(sys.argv[2]))
    with os.fdopen(os.dup(0), "rb") as file:
        sys.path[:] = pickle.load(file)  # noqa: S301 - from our parent, through its own descriptor
        target, arguments = pickle.load(file)  # noqa: S301
    with open(os.devnull, "rb") as nothing:  # noqa: PTH123
        os.dup2(nothing.fileno(), 0)
    code: Any = target(*arguments)
    return code if isinstance(code, int) else 0


if __name__ == "__main__":
    sys.exit(main())
