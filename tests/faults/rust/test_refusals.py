"""What cannot work is one line on standard error and exit code 2; nothing is started or left."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.child import running
from tests.support.rust_served import MODULE, Wheel, wheel


def refusal(wheel: Wheel, folder: Path, *flags: str, **env: str) -> list[str]:
    """The lines of the error; everything else about a refusal is checked here."""
    environ = {"SMG_ZMQ_SOCKET_DIR": str(folder)} | wheel.env | env
    with running(*flags, module=MODULE, env=environ) as child:
        assert child.exit_code(10) == 2, child.output
        assert "at hello" not in child.output
        assert not folder.is_dir() or not any(folder.iterdir())
        return [line.strip() for line in child.lines if " WARNING " not in line]


@pytest.fixture
def taken() -> Iterator[int]:
    """A port that somebody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        yield int(listener.getsockname()[1])


def test_a_port_in_use(binding: Wheel, folder: Path, taken: int) -> None:
    (line,) = refusal(binding, folder, "--port", str(taken))
    assert line.startswith("error: --host, --port: ")
    assert f"127.0.0.1:{taken}: Address already in use" in line


def test_a_handshake_port_in_use(binding: Wheel, folder: Path, taken: int) -> None:
    port = {"SMG_VLLM_SERVICER_HANDSHAKE_PORT": str(taken)}
    (line,) = refusal(binding, folder, **port)
    assert line == (
        f"error: SMG_VLLM_SERVICER_HANDSHAKE_PORT: got {taken} (Address already in use); "
        "allowed: a free port of 127.0.0.1, or 0"
    )


def test_every_variable_that_cannot_work_is_named(binding: Wheel, folder: Path) -> None:
    lines = refusal(
        binding,
        folder,
        SMG_VLLM_SERVICER_DRAIN_SECS="-1",
        SMG_VLLM_SERVICER_STARTUP_TIMEOUT_SECS="0",
        SMG_VLLM_SERVICER_PREFILL_TOKENS_PER_SEC="nan",
    )
    assert [line.split()[1] for line in lines] == [
        "SMG_VLLM_SERVICER_DRAIN_SECS:",
        "SMG_VLLM_SERVICER_STARTUP_TIMEOUT_SECS:",
        "SMG_VLLM_SERVICER_PREFILL_TOKENS_PER_SEC:",
    ]


def test_what_was_asked_for_is_never_left_out(folder: Path) -> None:
    """Unlike a fact the wheel does not know: an operator would believe that it is in force."""
    silence = {"SMG_VLLM_SERVICER_SILENCE_TIMEOUT_SECS": "60"}
    (line,) = refusal(wheel("older"), folder, "--metrics", **silence)
    assert line.startswith(
        "error: smg 1.13.0: its VllmGrpcServer has no SMG_VLLM_SERVICER_SILENCE_TIMEOUT_SECS "
        "(engine_silence_timeout_secs), no --metrics-port (metrics_bind_address); "
    )


def test_no_wheel(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "smg").mkdir()
    (tmp_path / "smg" / "__init__.py").touch()
    (line,) = refusal(Wheel("none", {"PYTHONPATH": str(tmp_path)}), folder)
    assert line.startswith("error: the Rust servicer needs the wheel smg (No module named")


def test_somebody_elses_folder(binding: Wheel, folder: Path) -> None:
    """Made beforehand in /tmp, it would let another user answer in the engine's place."""
    folder.mkdir(mode=0o700)
    if os.geteuid() == 0:
        os.chown(folder, 12345, -1)
        why = "it belongs to user 12345, not to 0"
    else:
        folder.chmod(0o770)
        why = "its mode is 0770"
    (line,) = refusal(binding, folder)
    assert line.startswith(f"error: SMG_ZMQ_SOCKET_DIR: got {str(folder)!r}: {why}; allowed: ")
