"""Files that are read again when they change (certificates, tokens).

A change is a new device, inode, size or mtime of any of them, which a rename, a rewrite and a
Kubernetes secret's link swap all bring about. A look costs one `stat` per file.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

Signature = tuple[tuple[int, int, int, int] | None, ...]


def signature(paths: Sequence[Path]) -> Signature:
    """What would differ if one of the files had changed; None stands for one that is not there."""
    return tuple(map(_stat, paths))


def _stat(path: Path) -> tuple[int, int, int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
