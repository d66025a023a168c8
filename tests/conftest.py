"""What every test gets: one event loop flavour, and properties judged by truth, not by speed."""

from __future__ import annotations

import os

import pytest
from hypothesis import settings

# A busy machine is no counterexample. In CI the examples are the same each time.
settings.register_profile("here", deadline=None, derandomize="CI" in os.environ, print_blob=True)
settings.load_profile("here")


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """grpc.aio runs on asyncio and nothing else, so trio is never tried."""
    return "asyncio"


@pytest.fixture(scope="session", autouse=True)
async def one_loop(anyio_backend: str) -> None:
    """One event loop for all tests.

    grpc.aio has one completion queue a process; what a finished test left in it is delivered to
    that test's loop, and if that one is closed, the error hits the test that runs by then.
    """
