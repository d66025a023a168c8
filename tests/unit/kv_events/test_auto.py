from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.kv_events.endpoints import source


def test_one_rank_publishes_where_only_its_own_user_gets() -> None:
    made = auto.publisher("vllm", 1, environ={})
    assert made is not None
    folder = Path(made.endpoint.removeprefix("ipc://")).parent
    assert folder.stat().st_mode & 0o777 == 0o700
    assert made.replay_endpoint == f"ipc://{folder}/replay"
    assert source(0, made.endpoint, made.replay_endpoint).bind is False
    auto.clean()
    assert not folder.exists()


def test_several_ranks_publish_over_loopback_to_us() -> None:
    """Their PUB sockets connect, so nothing listens where another machine could ask."""
    made = auto.publisher("vllm", 4, environ={})
    assert made is not None
    sources = [source(rank, made.endpoint, made.replay_endpoint) for rank in range(4)]
    assert all(one.bind for one in sources)
    live = [one.live.port for one in sources]
    replay = [one.replay.port for one in sources if one.replay is not None]
    assert len({*live, *replay}) == 8
    assert {one.live.host for one in sources} == {"127.0.0.1"}


def test_an_engine_that_takes_no_ipc_gets_loopback() -> None:
    made = auto.publisher("sglang", 1, ipc=False, environ={})
    assert made is not None
    assert made.endpoint.startswith("tcp://127.0.0.1:")


@pytest.mark.parametrize("value", ["0", "false", "No", " off "])
def test_it_can_be_switched_off(value: str) -> None:
    assert auto.publisher("vllm", 1, environ={"SMG_VLLM_SERVICER_KV_EVENTS": value}) is None


def test_an_unknown_word_does_not_switch_it_on() -> None:
    """A misspelt "off" is refused: token ids travel in events."""
    with pytest.raises(ConfigError, match="SMG_VLLM_SERVICER_KV_EVENTS: got 'of'; allowed"):
        auto.publisher("vllm", 1, environ={"SMG_VLLM_SERVICER_KV_EVENTS": "of"})


def test_one_line_says_that_it_is_on_and_how_to_leave_it(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level("INFO")
    auto.publisher("tokenspeed", 1, environ={})
    (line,) = [r.getMessage() for r in caplog.records if r.name == auto.__name__]
    assert "--kv-events-config" in line
    assert "SMG_TOKENSPEED_SERVICER_KV_EVENTS=off" in line


def test_ports_that_are_held_are_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        port = held.getsockname()[1]
        monkeypatch.setattr(auto, "FIRST_PORT", port)
        monkeypatch.setattr(auto, "_ephemeral", lambda: port + 1)
        with pytest.raises(ConfigError, match="no 1 consecutive ports"):
            auto.free_ports(1)


def test_a_range_without_room_is_said_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "range").write_text("1024\t65000\n")
    monkeypatch.setattr(auto, "_RANGE", tmp_path / "range")
    assert 10_000 <= auto.free_ports(2) < 32_768
    assert len(caplog.records) == 1


def bound(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    return made


def gone() -> int:
    """The number of a process that is over."""
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


def test_folders_of_killed_servers_go_when_the_next_one_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    parent = Path(tempfile.mkdtemp(prefix="smg-"))  # `tmp_path` is too long for a socket's path
    monkeypatch.setattr(tempfile, "tempdir", str(parent))
    dead = gone()
    names = {
        "left": f"smg-kv-{dead}-left",
        "alive": f"smg-kv-{os.getppid()}-alive",
        "in use": f"smg-kv-{dead}-used",
        "empty": f"smg-kv-{dead}-empty",
        "other": "smg-kv-other",
    }
    listeners = []
    for what, name in names.items():
        (parent / name).mkdir()
        if what != "empty":
            listeners.append(bound(parent / name / "events"))
        if what == "in use":
            listeners[-1].listen()
        elif what != "empty":
            listeners.pop().close()
    (parent / f"smg-kv-{dead}-link").symlink_to(parent / names["alive"])
    try:
        first = auto.publisher("vllm", 1, environ={})
        second = auto.publisher("vllm", 1, environ={})
        assert first is not None
        assert second is not None
        left = {path.name for path in parent.iterdir()}
    finally:
        auto.clean()
        for listener in listeners:
            listener.close()
        shutil.rmtree(parent)
    made = {Path(one.endpoint.removeprefix("ipc://")).parent.name for one in (first, second)}
    assert left == {*names.values(), f"smg-kv-{dead}-link", *made} - {names["left"]}
