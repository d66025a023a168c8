"""What can be said and heard of the end of another process."""

from __future__ import annotations

import os
import signal


def in_words(code: int | None) -> str:
    """An exit code as `Popen` has it: "ended with exit code 1", "was ended by SIGKILL"."""
    if code is None:  # it is as good as over, and nobody has asked yet
        return "ended"
    if code >= 0:
        return f"ended with exit code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"


def end_descriptor(pid: int) -> int | None:
    """A descriptor that is readable from the end of that process on; the caller closes it.

    None when there is no such process, or where the system (Linux 5.3) has no such thing.
    """
    try:
        return os.pidfd_open(pid)
    except (AttributeError, OSError):
        return None
