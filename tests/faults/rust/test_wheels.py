"""What the two wheels are known to lack (the table in DEVELOPMENT.md), asked of them."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.support.rust_served import Wheel

CLASSES = ("VllmGrpcServer", "SglangGrpcServer", "TokenSpeedGrpcServer")
LACKS = {
    "older": {
        "engine_silence_timeout_secs",
        "engine_prefill_tokens_per_sec",
        "active_requests",
        "set_ready",
        "kv_relay_subscribed",
        "metrics_bind_address",
    },
    "newer": set(),
}
MEDIA = {"media_processor", "smg_media_processor"}
ENCODERS = {"encode_dispatcher"}


@pytest.mark.parametrize("name", CLASSES)
def test_what_a_wheel_lacks(binding: Wheel, name: str) -> None:
    """A wheel that gains one of these makes a line of the table untrue."""
    code = (
        "from smg_grpc_servicer.rust.binding import load_binding\n"
        f"print('\\n'.join(load_binding({name!r}).describe()))"
    )
    path = os.pathsep.join(filter(None, (binding.env.get("PYTHONPATH"), *sys.path)))
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=True,
    )
    lines = done.stdout.splitlines()
    wheel = "smg 1.13.0" if binding.name == "older" else "tokenspeed-smg 1.13.0.post20261027"
    assert lines[0] == f"{wheel}, {name}"
    cannot = {line.rpartition("(")[2].rstrip(")") for line in lines if "  cannot " in line}
    other = MEDIA if name != "VllmGrpcServer" else set()
    if name != "SglangGrpcServer" or binding.name == "older":
        other = other | ENCODERS
    assert cannot == LACKS[binding.name] | other
