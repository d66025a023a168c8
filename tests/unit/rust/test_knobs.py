"""The variables of the Rust path."""

from __future__ import annotations

from pathlib import Path

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.rust import knobs
from smg_grpc_servicer.rust.knobs import RustKnobs


def test_defaults_are_the_published_ones() -> None:
    assert knobs.resolve("vllm", {}) == RustKnobs(
        handshake_port=0,
        drain_seconds=5,
        startup_seconds=1800,
        startup_ceiling_seconds=14400,
        silence_seconds=300,
        prefill_tokens_per_second=2000,
        socket_dir=None,
        worker_threads=None,
        asked={},
    )


def test_what_was_set_is_known_by_its_variable() -> None:
    found = knobs.resolve(
        "sglang",
        {
            "SMG_SGLANG_SERVICER_DRAIN_SECS": "0",
            "SMG_VLLM_SERVICER_SILENCE_TIMEOUT_SECS": "1",
            "SMG_ZMQ_SOCKET_DIR": "~/sockets",
            "SMG_SGLANG_SERVICER_STARTUP_TIMEOUT_SECS": " ",
        },
    )
    assert found.drain_seconds == 0
    assert found.silence_seconds == 300
    assert found.socket_dir == Path("~/sockets").expanduser()
    assert found.asked == {
        "drain_seconds": "SMG_SGLANG_SERVICER_DRAIN_SECS",
        "socket_dir": "SMG_ZMQ_SOCKET_DIR",
    }


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("HANDSHAKE_PORT", "65536"),
        ("DRAIN_SECS", "-0.1"),
        ("DRAIN_SECS", "inf"),
        ("STARTUP_TIMEOUT_SECS", "0"),
        ("STARTUP_CEILING_SECS", "-1"),
        ("SILENCE_TIMEOUT_SECS", "0"),
        ("PREFILL_TOKENS_PER_SEC", "1.5"),
        # More than the wheel's types hold: it would name a keyword that nobody has heard of.
        ("DRAIN_SECS", "1e300"),
        ("STARTUP_TIMEOUT_SECS", "1e10"),
        ("STARTUP_CEILING_SECS", "1e300"),
        ("SILENCE_TIMEOUT_SECS", "1e300"),
        ("PREFILL_TOKENS_PER_SEC", "1" + 40 * "0"),
    ],
)
def test_refused(name: str, text: str) -> None:
    variable = f"SMG_VLLM_SERVICER_{name}"
    with pytest.raises(ConfigError, match=f"^{variable}: got '{text}'"):
        knobs.resolve("vllm", {variable: text})


def test_all_faults_at_once() -> None:
    with pytest.raises(ConfigError) as told:
        knobs.resolve(
            "vllm",
            {"SMG_VLLM_SERVICER_DRAIN_SECS": "x", "SMG_VLLM_SERVICER_SILENCE_TIMEOUT_SECS": "x"},
        )
    assert len(str(told.value).splitlines()) == 2


def test_what_rust_reads_itself_is_checked_too() -> None:
    """A servicer that takes one thread for a typing error is found out in production."""
    for text in ("four", "0", "100000"):
        with pytest.raises(ConfigError, match=rf"^SMG_SERVICER_WORKER_THREADS: got '{text}'"):
            knobs.resolve("vllm", {"SMG_SERVICER_WORKER_THREADS": text})


def test_the_home_of_nobody() -> None:
    with pytest.raises(ConfigError, match=r"^SMG_ZMQ_SOCKET_DIR: got '~no-such-user/x'"):
        knobs.resolve("vllm", {"SMG_ZMQ_SOCKET_DIR": "~no-such-user/x"})
