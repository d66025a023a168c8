"""Opens a file by its name in a directory, and never one outside it.

Every step is opened relative to an already open directory without following links, and what was
opened is checked afterwards: a link that is swapped in between two looks changes nothing.
`RefusedFile` says why a file that exists is not opened. POSIX only.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Sequence
from pathlib import Path
from typing import BinaryIO

_MAX_HOPS = 8
# Without O_NONBLOCK the open of a fifo would wait for a writer for ever.
_FILE = os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC
_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


class RefusedFile(Exception):
    """The file is there but must not be read; the message completes "file X ..."."""


def open_regular(root: Path, name: str, stores: Sequence[Path] = ()) -> BinaryIO:
    """The regular file `name` of `root`, open for reading.

    A link is followed while it stays in `root` or one of `stores`; all are real paths.
    `OSError` when there is no such file.
    """
    folder, leaf = root, name
    for _ in range(_MAX_HOPS):
        descriptor, target = _open_or_readlink(_containing(folder, (root, *stores)), folder, leaf)
        if descriptor is not None:
            return _checked(descriptor)
        joined = folder / target
        leaf = joined.name
        if leaf in ("", ".."):
            raise RefusedFile("is a link to a directory")
        # Only a hint where to look next: the walk follows no link it did not check.
        folder = Path(os.path.realpath(joined.parent))
    raise RefusedFile(f"is a chain of more than {_MAX_HOPS} links")


def _containing(folder: Path, allowed: Sequence[Path]) -> Path:
    for base in allowed:
        if folder.is_relative_to(base):
            return base
    raise RefusedFile("is a link that leaves the model directory")


def _open_or_readlink(base: Path, folder: Path, leaf: str) -> tuple[int | None, str]:
    """A descriptor of `folder/leaf`, or the target it links to."""
    directory = os.open(base, _DIRECTORY)
    try:
        for part in folder.relative_to(base).parts:
            inner = os.open(part, _DIRECTORY, dir_fd=directory)
            os.close(directory)
            directory = inner
        try:
            return os.open(leaf, _FILE, dir_fd=directory), ""
        except OSError as error:
            if error.errno == errno.ENXIO:  # a socket
                raise RefusedFile("is not a regular file") from None
            if error.errno not in (errno.ELOOP, errno.EMLINK):  # EMLINK: FreeBSD's word for it
                raise
        return None, os.readlink(leaf, dir_fd=directory)
    finally:
        os.close(directory)


def _checked(descriptor: int) -> BinaryIO:
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise RefusedFile("is not a regular file")
        return os.fdopen(descriptor, "rb")
    except BaseException:
        os.close(descriptor)
        raise
