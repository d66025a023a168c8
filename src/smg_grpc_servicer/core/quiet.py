"""Silences the log lines of grpc's C core in processes of our own.

They are no JSON, and say in its own words what we say in ours (a port in use, a failed handshake).
Imports nothing: C core reads the variable while `grpc` is imported, and never again.
`GRPC_VERBOSITY=error` (or info, debug) brings them back.
"""

from __future__ import annotations

import os


def silence_core() -> None:
    """Call it before `grpc` is imported; a variable that is set already stays."""
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
