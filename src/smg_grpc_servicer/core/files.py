"""Files that are read again when they change (certificates, tokens).

A change is a new device, inode, size or mtime of any of them, which a rename, a rewrite and a
Kubernetes secret's link swap all bring about. A look costs one `stat` per file.
"""

from __future__ import annotations

import logging
import os
import stat
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Generic, TypeVar

from smg_grpc_servicer.core.errors import ConfigError

log = logging.getLogger(__name__)

T = TypeVar("T")

Signature = tuple[tuple[int, int, int, int] | None, ...]


class Watched(Generic[T]):
    """What `read` made of some files; a reading that fails leaves the last good one in force.

    A failure is logged once per change and tried again at each look: what was wrong may be the
    moment (no file descriptors left) and not the file.

    :raises ConfigError: the first reading failed.
    """

    def __init__(self, name: str, what: str, paths: Sequence[Path], read: Callable[[], T]) -> None:
        self._name = name
        self._what = what
        self._paths = tuple(paths)
        self._read = read
        self._good = self._told = signature(self._paths)
        self.value = read()

    def refresh(self) -> bool:
        """Whether `value` is a new one."""
        now = signature(self._paths)
        if now == self._good:
            self._told = now
            return False
        try:
            self.value = self._read()
        except ConfigError as error:
            if now != self._told:
                self._told = now
                log.error("%s changed, but the old %s stay: %s", self._name, self._what, error)
            return False
        self._good = self._told = now
        log.info("%s changed and was read again", self._name)
        return True


def signature(paths: Sequence[Path]) -> Signature:
    """What would differ if one of the files had changed; None stands for one that is not there."""
    return tuple(map(_stat, paths))


def read_regular(flag: str, path: Path) -> bytes:
    """The bytes of a regular file; a FIFO or device could make the reader wait for ever.

    :raises ConfigError: it is something else, or cannot be read; names `flag`.
    """
    try:
        # Without O_NONBLOCK the open of a FIFO would wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            if stat.S_ISREG(os.fstat(descriptor).st_mode):
                with os.fdopen(descriptor, "rb", closefd=False) as file:
                    return file.read()
        finally:
            os.close(descriptor)
    except OSError as error:
        raise ConfigError(f"{flag}: cannot read {str(path)!r} ({error.strerror})") from None
    raise ConfigError(f"{flag}: got {str(path)!r}, which is not a regular file")


def _stat(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
