"""The entry point `sglang.srt.plugins: smg-servicer`: our event loop under SGLang's gRPC launcher.

SGLang's launcher runs `serve_grpc` on whatever loop `asyncio.run` makes, before the module is
loaded that would have made it uvloop's. SGLang calls `register` in every process, before anything
runs; it imports the standard library only, and uvloop where a launch has the gRPC flag.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys

log = logging.getLogger(__name__)

FLAGS = ("--smg-grpc-mode", "--grpc-mode")
VARIABLE = "SMG_SERVICER_EVENT_LOOP"


def register() -> None:
    """See the module. SMG_SERVICER_EVENT_LOOP=asyncio keeps Python's own."""
    if not any(flag in sys.argv for flag in FLAGS):
        return
    if os.environ.get(VARIABLE, "").strip().lower() == "asyncio":
        return
    try:
        import uvloop
    except ImportError:
        log.debug("uvloop is not installed")
        return
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
