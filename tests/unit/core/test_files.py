"""Files that change while the server runs, and files that are none."""

from __future__ import annotations

import logging
import os
import socket
import tempfile
from pathlib import Path

import pytest

from smg_grpc_servicer.core.auth import TokenFile
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.files import Watched, read_regular


@pytest.fixture
def tokens(tmp_path: Path) -> Path:
    path = tmp_path / "tokens"
    path.write_text("old\n")
    return path


def replace(path: Path, text: str) -> None:
    new = path.with_name("new")
    new.write_text(text)
    new.replace(path)


def failing(*_: object, **__: object) -> int:
    raise OSError(24, "Too many open files")


def test_a_moment_without_descriptors_does_not_keep_old_tokens(
    tokens: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Q1: a file that could not be read once is read at the next look; a revoked token is out."""
    caplog.set_level(logging.INFO)
    file = TokenFile(tokens)
    replace(tokens, "new\n")
    with monkeypatch.context() as out_of_descriptors:
        out_of_descriptors.setattr(os, "open", failing)
        for _ in range(3):
            assert file.accepts(b"old")
            assert not file.accepts(b"new")
    assert file.accepts(b"new")
    assert not file.accepts(b"old")
    assert [record.levelname for record in caplog.records] == ["ERROR", "INFO"]
    assert "cannot read" in caplog.text
    assert "Too many open files" in caplog.text


def test_each_bad_change_is_told_once(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A flood of calls fills no log, and a second fault is not taken for the first."""
    file = TokenFile(tokens)
    kept = tokens.with_name("kept")
    for _ in range(2):
        tokens.rename(kept)
        for _ in range(3):
            assert file.accepts(b"old")
        kept.rename(tokens)
        assert file.accepts(b"old")
    assert caplog.text.count("token file changed, but the old tokens stay") == 2


def test_an_unchanged_file_is_not_read_again(tokens: Path) -> None:
    """A look at every call costs one stat."""
    read: list[str] = []
    file = Watched("file", "ones", [tokens], lambda: read.append(tokens.read_text()))
    assert not file.refresh()
    assert read == ["old\n"]
    replace(tokens, "new\n")
    assert file.refresh()
    assert not file.refresh()
    assert read == ["old\n", "new\n"]


def open_descriptors() -> int:
    return len(list(Path("/dev/fd").iterdir()))


def _fifo(path: Path) -> Path:
    os.mkfifo(path)
    return path


def test_only_a_regular_file_is_read(tmp_path: Path) -> None:
    """A FIFO would be waited for, a device never ends: both are refused, by flag and path."""
    places = {
        _fifo(tmp_path / "fifo"): "which is not a regular file",
        Path("/dev/zero"): "which is not a regular file",
        tmp_path: "which is not a regular file",
        tmp_path / "gone": "No such file or directory",
    }
    for path, words in places.items():
        with pytest.raises(ConfigError, match=rf"--tls-key: .*'{path}'.*{words}"):
            read_regular("--tls-key", path)
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "file")
    (tmp_path / "file").write_bytes(b"x")
    assert read_regular("--tls-key", link) == b"x"


def test_a_refused_file_leaves_no_descriptor_open(tmp_path: Path) -> None:
    """It is tried again at every call."""
    with tempfile.TemporaryDirectory() as short, socket.socket(socket.AF_UNIX) as listener:
        place = f"{short}/s"
        listener.bind(place)
        refused = (tmp_path, _fifo(tmp_path / "fifo"), Path(place))
        before = open_descriptors()
        for path in refused * 3:
            with pytest.raises(ConfigError):
                read_regular("--auth-token-file", path)
        assert open_descriptors() == before


def test_a_fifo_in_place_of_the_tokens(tokens: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Stops the start; later the old tokens stay, told once, and nothing hangs."""
    file = TokenFile(tokens)
    tokens.unlink()
    _fifo(tokens)
    for _ in range(3):
        assert file.accepts(b"old")
    assert caplog.text.count("the old tokens stay") == 1
    with pytest.raises(ConfigError, match=r"--auth-token-file: .*not a regular file"):
        TokenFile(tokens)
