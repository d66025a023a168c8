"""The private folder of the sockets between server and engine.

Who can write there can answer in the engine's place, so it is ours, mode 0700 and no link, or it
is refused. A file is named `PREFIX-PID-WHAT.sock`; ours go when we end, those of processes that are
gone when the next one starts.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
from dataclasses import dataclass
from pathlib import Path

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.leftovers import is_deserted, is_over

ENV = "SMG_ZMQ_SOCKET_DIR"
_NAME = re.compile(r"[a-z-]+-(?P<pid>[0-9]+)-[a-z]+\.sock")
_LONGEST = 107
"""Bytes that a socket's path may have; `sun_path` of unix(7) without its NUL."""


@dataclass(frozen=True, slots=True)
class Sockets:
    """The names one server uses in the folder."""

    folder: Path
    prefix: str

    @property
    def base_url(self) -> str:
        """The binding adds `-in.sock` and `-out.sock`."""
        return f"ipc://{self._base}"

    @property
    def handshake_url(self) -> str:
        return f"ipc://{self._base}-hs.sock"

    @property
    def _base(self) -> Path:
        return self.folder / f"{self.prefix}-{os.getpid()}"

    def remove(self) -> None:
        """Remove what this server left; what it never made is no fault."""
        with contextlib.suppress(OSError):
            for path in self.folder.glob(f"{self._base.name}-*.sock"):
                path.unlink(missing_ok=True)


def default() -> Path:
    """The published package's place."""
    return Path(f"/tmp/smg-zmq-{os.getuid()}")  # noqa: S108 - its owner and mode are checked


def open_folder(folder: Path | None, prefix: str) -> Sockets:
    """Make or check the folder and clear what dead processes left in it.

    :raises ConfigError: it cannot be made, is not ours alone, or its name is too long for sockets.
    """
    path = default() if folder is None else folder.absolute()
    sockets = Sockets(path, prefix)
    longest = len(os.fsencode(sockets.base_url.removeprefix("ipc://") + "-out.sock"))
    if longest > _LONGEST:
        raise ConfigError(
            f"{ENV}: got {str(path)!r}, which makes a socket's path {longest} bytes long; "
            f"allowed: a folder whose sockets have at most {_LONGEST}"
        )
    try:
        # Not by `parents=True`, whose folders would get the default mode; the last one is ours.
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileExistsError):
            path.mkdir(mode=0o700)
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError as error:
        raise _refused(path, _why(path, error)) from None
    try:
        status = os.fstat(descriptor)
    finally:
        os.close(descriptor)
    if status.st_uid != os.geteuid():
        raise _refused(path, f"it belongs to user {status.st_uid}, not to {os.geteuid()}")
    if stat.S_IMODE(status.st_mode) & 0o077:
        raise _refused(path, f"its mode is {stat.S_IMODE(status.st_mode):04o}")
    _clear(path)
    return sockets


def _why(path: Path, error: OSError) -> str:
    if path.is_symlink():
        return "it is a symbolic link"
    if path.exists() and not path.is_dir():
        return "it is not a folder"
    return error.strerror or type(error).__name__


def _refused(path: Path, why: str) -> ConfigError:
    return ConfigError(
        f"{ENV}: got {str(path)!r}: {why}; allowed: a folder of this user with mode 0700 and no "
        "link, or one that is not there yet"
    )


def _clear(folder: Path) -> None:
    """Remove sockets whose process is gone and that nobody listens on."""
    with contextlib.suppress(OSError):
        for path in folder.iterdir():
            named = _NAME.fullmatch(path.name)
            if named and is_over(int(named["pid"])) and is_deserted(path):
                path.unlink(missing_ok=True)
