"""Socket files that a killed process left behind: who made them, and whether anybody is there.

A file's name tells the process; it may be shared with a container that has other process numbers,
so the socket itself is asked too.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path


def is_over(pid: int) -> bool:
    """Whether the process that made a file is gone. Our number was another's before: in a container
    that starts again it is the same each time, and what has our names would be in our way.
    """
    if pid == os.getpid():
        return True
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except (OSError, OverflowError):
        pass  # somebody else's, or none that can be asked
    return False


def is_deserted(path: Path) -> bool:
    """Whether this is a socket that nobody listens on."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.setblocking(False)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            return True
        except OSError:
            return False
    return False
