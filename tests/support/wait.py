"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import monotonic


async def until(condition: Callable[[], bool], seconds: float = 5.0) -> float:
    """Give the loop turns until `condition` holds; how long that took, in seconds.

    :raises AssertionError: it did not hold in time.
    """
    start = monotonic()
    while not condition():
        assert monotonic() - start < seconds, f"not within {seconds} s"
        await asyncio.sleep(0.001)
    return monotonic() - start
