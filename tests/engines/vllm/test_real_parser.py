"""Our flags on the parsers of an installed vLLM, and its launcher with ours in its place."""

from __future__ import annotations

from typing import Any

import pytest

# The first test that asks what vLLM says waits for it.
pytestmark = pytest.mark.timeout(400)


def test_a_real_command_line_parses_to_our_options(said: Any) -> None:
    assert said["parsed"] == {
        "clashes": [],
        "http": [],
        "same": True,
        "drain": 3.0,
        "host": "0.0.0.0",
        "port": 8001,
        "by default": "0.0.0.0:8000",  # as the README has it
        "tokens": 1,
        "ours": True,
        "known": True,
    }
