"""What processes of our own keep off standard error while they start. Imports nothing heavy.

- The log lines of grpc's C core. They are no JSON, and say in its own words what we say in ours (a
  port in use, a failed handshake). C core reads the variable while `grpc` is imported, and never
  again. `GRPC_VERBOSITY=error` (or info, debug) brings them back.
- Tracebacks of a Ctrl-C that comes while modules are imported.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager


def silence_core() -> None:
    """Call it before `grpc` is imported; a variable that is set already stays."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")


@contextmanager
def quiet_interrupt() -> Iterator[None]:
    """For imports: SIGINT ends the process as it does one that never heard of it."""
    before = signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
