"""What every test gets: one event loop flavour."""

from __future__ import annotations

import pytest


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """grpc.aio runs on asyncio and nothing else, so trio is never tried."""
    return "asyncio"
