"""Both generations of the wheel, a socket folder with a short name, and no process left behind."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.rust_served import Wheel, wheel


@pytest.fixture(params=["older", "newer"])
def binding(request: pytest.FixtureRequest) -> Wheel:
    return wheel(request.param)


@pytest.fixture
def folder() -> Iterator[Path]:
    """Not in `tmp_path`, whose names are too long for sockets."""
    parent = Path(tempfile.mkdtemp(prefix="smg-"))
    yield parent / "s"
    shutil.rmtree(parent)
