"""The folder of the sockets: ours alone, and left as it was found."""

from __future__ import annotations

import os
import re
import shutil
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.rust import socket_dir
from smg_grpc_servicer.rust.socket_dir import open_folder


@pytest.fixture
def parent() -> Iterator[Path]:
    """Not `tmp_path`, whose names are too long for sockets on some systems."""
    made = Path(tempfile.mkdtemp(prefix="smg-")).resolve()
    yield made
    shutil.rmtree(made)


def listener(path: Path) -> socket.socket:
    made = socket.socket(socket.AF_UNIX)
    made.bind(str(path))
    made.listen()
    return made


def test_it_is_made_for_us_alone(parent: Path) -> None:
    old = os.umask(0)
    try:
        sockets = open_folder(parent / "a" / "b", "servicer")
    finally:
        os.umask(old)
    status = (parent / "a" / "b").stat()
    assert stat.S_IMODE(status.st_mode) == 0o700
    assert status.st_uid == os.geteuid()
    assert sockets.base_url == f"ipc://{parent}/a/b/servicer-{os.getpid()}"
    assert sockets.handshake_url == f"{sockets.base_url}-hs.sock"


def test_the_default_is_the_published_one() -> None:
    assert socket_dir.default() == Path(f"/tmp/smg-zmq-{os.getuid()}")


def refused(folder: Path, why: str) -> None:
    told = re.escape(f"SMG_ZMQ_SOCKET_DIR: got {str(folder)!r}: {why}; allowed: ")
    with pytest.raises(ConfigError, match=told):
        open_folder(folder, "servicer")


@pytest.mark.parametrize("mode", [0o750, 0o701, 0o1777])
def test_others_may_not_enter(parent: Path, mode: int) -> None:
    (parent / "a").mkdir()
    (parent / "a").chmod(mode)
    refused(parent / "a", f"its mode is {mode:04o}")


def test_a_link_is_refused(parent: Path) -> None:
    """Whoever made it can lead it elsewhere at any time."""
    (parent / "a").mkdir(mode=0o700)
    (parent / "b").symlink_to(parent / "a")
    refused(parent / "b", "it is a symbolic link")


def test_a_file_is_refused(parent: Path) -> None:
    (parent / "a").touch()
    refused(parent / "a", "it is not a folder")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a folder away")
def test_another_users_is_refused(parent: Path) -> None:
    (parent / "a").mkdir(mode=0o700)
    os.chown(parent / "a", 12345, -1)
    refused(parent / "a", "it belongs to user 12345, not to 0")


def test_a_name_too_long_for_a_socket(parent: Path) -> None:
    """The binding would fail much later, with an error that does not say which file."""
    with pytest.raises(ConfigError, match=r"a socket's path [0-9]+ bytes long; allowed"):
        open_folder(parent / ("x" * 90), "servicer")
    assert not any(parent.iterdir())


def test_only_our_files_are_removed(parent: Path) -> None:
    sockets = open_folder(parent / "a", "servicer")
    other = parent / "a" / f"servicer-{os.getpid()}0-in.sock"
    for name in (f"servicer-{os.getpid()}-in.sock", f"servicer-{os.getpid()}-hs.sock", other.name):
        (parent / "a" / name).touch()
    sockets.remove()
    assert list((parent / "a").iterdir()) == [other]
    sockets.remove()


def test_what_the_dead_left_is_removed(parent: Path) -> None:
    """Not what a living process has, nor a socket on which somebody listens: its process may have
    another number here, as in a container that shares the folder.
    """
    folder = open_folder(parent / "a", "servicer").folder
    dead = gone()
    stale = folder / f"servicer-{dead}-in.sock"
    listener(stale).close()
    kept = [
        folder / f"sglang-servicer-{dead}-out.sock",
        folder / f"servicer-{os.getppid()}-in.sock",
    ]
    foreign = listener(kept[0])
    listener(kept[1]).close()
    kept.append(folder / "notes.txt")
    kept[2].touch()
    open_folder(folder, "servicer")
    assert sorted(folder.iterdir()) == sorted(kept)
    foreign.close()


def test_what_another_process_left_under_our_number_is_removed(parent: Path) -> None:
    """In a container that was killed and starts again, the number is the same each time; the server
    could not bind. What is listened on belongs to another container, and stays.
    """
    folder = open_folder(parent / "a", "servicer").folder
    names = [folder / f"servicer-{os.getpid()}-{what}.sock" for what in ("in", "out")]
    listener(names[0]).close()
    foreign = listener(names[1])
    open_folder(folder, "servicer")
    assert list(folder.iterdir()) == [names[1]]
    foreign.close()


def gone() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        return process.pid
