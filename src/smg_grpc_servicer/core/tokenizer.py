"""The tokenizer archive that GetTokenizer sends.

A zip of the model's tokenizer files, flat names. Its bytes depend only on the files' names and
contents (one deflate setting, fixed dates and modes, sorted), so replicas with the same zlib give
one SHA-256. What a gateway accepts bounds it: 50 files, 200 MiB zipped, 500 MiB unpacked, messages
under 4 MiB, lower-case hex SHA-256 of the whole on the last chunk only.
Raises `FailedPrecondition` naming the file and the reason when there is nothing fit to send.
"""

from __future__ import annotations

import asyncio
import hashlib
import io
import logging
import os
import time
import zipfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import BinaryIO

from smg_grpc_servicer.core.contained import RefusedFile, open_regular
from smg_grpc_servicer.core.errors import FailedPrecondition, Unavailable
from smg_grpc_servicer.core.hub_cache import blob_stores, resolve

__all__ = ["Bundle", "TokenizerSource", "build", "chunks", "resolve"]

TOKENIZER_FILES = (
    "tokenizer.json",
    "tekken*.json",  # Mistral
    "*.model",  # sentencepiece (tokenizer.model, spiece.model, ...) and tiktoken.model
    "tokenizer.model.v*",  # Mistral's sentencepiece, by version
    "*.spm",
    "*.tiktoken",
    "vocab.json",
    "vocab.txt",
)
"""One of these makes a directory a tokenizer's."""

COMPANION_FILES = (
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "merges.txt",
    "chat_template.json",
    "*.jinja",
    "config.json",
    "generation_config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "video_preprocessor_config.json",
)
"""Sent along where present. Never code: a gateway must not run what a model brings."""

MAX_FILES = 50
MIB = 1024 * 1024
MAX_ZIP_BYTES = 200 * MIB
MAX_UNPACKED_BYTES = 500 * MIB
CHUNK_BYTES = 256 * 1024
MAX_CHUNK_BYTES = 4 * MIB - 4096  # room for the field tags and the hash

_READ_BYTES = MIB
_EPOCH = (1980, 1, 1, 0, 0, 0)  # the first date a zip can hold
_MODE = 0o100644 << 16
_LFS_POINTER = b"version https://git-lfs.github.com/spec/"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Bundle:
    """A finished archive: its bytes, their SHA-256 (lower-case hex) and the file names in it."""

    data: bytes
    sha256: str
    names: tuple[str, ...]


def build(
    directory: Path,
    max_bytes: int = MAX_ZIP_BYTES,
    max_unpacked_bytes: int = MAX_UNPACKED_BYTES,
) -> Bundle:
    """The archive of `directory`. Blocks for seconds on a large tokenizer: not for the loop."""
    root = Path(os.path.realpath(directory))
    names = _select(root)
    stores = blob_stores(root)
    with ExitStack() as stack:
        files = {name: stack.enter_context(_open(root, name, stores)) for name in names}
        sizes = {name: os.fstat(file.fileno()).st_size for name, file in files.items()}
        for name in names:
            if not sizes[name] and _matches(name, TOKENIZER_FILES):
                raise FailedPrecondition(
                    f"tokenizer: file {name!r} is empty (an incomplete download?)"
                )
        if sum(sizes.values()) > max_unpacked_bytes:
            largest = max(names, key=lambda name: sizes[name])
            raise FailedPrecondition(
                f"tokenizer: the files have {_mib(sum(sizes.values()))} in all, the largest is "
                f"{largest!r} with {_mib(sizes[largest])}; allowed are {_mib(max_unpacked_bytes)}"
            )
        buffer = _Buffer(max_bytes)
        with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED) as archive:
            for name in names:
                buffer.name = name
                _add(archive, name, files[name], sizes[name])
    data = buffer.getvalue()
    return Bundle(data, hashlib.sha256(data).hexdigest(), names)


def chunks(bundle: Bundle, size: int = CHUNK_BYTES) -> Iterator[tuple[bytes, str]]:
    """`(data, sha256)` pairs to send in order; the hash is "" but on the last. Never none."""
    if not 0 < size <= MAX_CHUNK_BYTES:
        raise ValueError(f"size: got {size}, allowed are 1 to {MAX_CHUNK_BYTES}")
    total = len(bundle.data)
    for start in range(0, max(total, 1), size):
        last = start + size >= total
        yield bundle.data[start : start + size], bundle.sha256 if last else ""


class TokenizerSource:
    """One process's archive: built once, off the loop, shared by all callers.

    A caller that leaves does not stop the build for the others; a failed build is told to those
    who waited for it and tried again by the next caller. One event loop only.
    """

    def __init__(
        self, path: Callable[[], str | None], revision: Callable[[], str | None] = lambda: None
    ) -> None:
        self._path = path
        self._revision = revision
        self._bundle: Bundle | None = None
        self._building: asyncio.Task[Bundle] | None = None
        self._waiting = 0

    async def bundle(self) -> Bundle:
        """The archive; builds it when this is the first call."""
        if self._bundle is not None:
            return self._bundle
        if self._building is None:
            path = self._path()
            if not path:
                raise FailedPrecondition("tokenizer: the model has no tokenizer path")
            work = asyncio.to_thread(_resolve_and_build, path, self._revision())
            self._building = asyncio.create_task(work, name="tokenizer-archive")
            self._building.add_done_callback(self._built)
        task = self._building
        self._waiting += 1
        try:
            await asyncio.wait((task,))  # unlike awaiting the task, leaves it alone on a cancel
        finally:
            self._waiting -= 1
        if task.cancelled():
            raise Unavailable("tokenizer: the server is stopping")
        return task.result()

    def statistics(self) -> dict[str, int]:
        return {"building": int(self._building is not None), "waiting": self._waiting}

    def _built(self, task: asyncio.Task[Bundle]) -> None:
        self._building = None
        # Reading the exception also keeps asyncio quiet when every caller has left.
        if not task.cancelled() and task.exception() is None:
            self._bundle = task.result()


def _resolve_and_build(path: str, revision: str | None) -> Bundle:
    start = time.monotonic()
    bundle = build(resolve(path, revision))
    logger.info(
        "tokenizer archive built: %d files, %d bytes, sha256 %s, %.1f s",
        len(bundle.names),
        len(bundle.data),
        bundle.sha256,
        time.monotonic() - start,
    )
    return bundle


def _select(root: Path) -> tuple[str, ...]:
    """The names to send, sorted."""
    try:
        with os.scandir(root) as entries:
            present = [e.name for e in entries if not e.is_dir(follow_symlinks=False)]
    except OSError as error:
        raise FailedPrecondition(
            f"tokenizer: directory {str(root)!r} cannot be read: {error.strerror}"
        ) from error
    present = sorted(name for name in present if _portable(name))
    if not any(_matches(name, TOKENIZER_FILES) for name in present):
        raise FailedPrecondition(
            f"tokenizer: directory {str(root)!r} has no tokenizer file; looked for "
            + ", ".join(TOKENIZER_FILES)
        )
    names = tuple(name for name in present if _matches(name, TOKENIZER_FILES + COMPANION_FILES))
    if len(names) > MAX_FILES:
        raise FailedPrecondition(
            f"tokenizer: directory {str(root)!r} has {len(names)} tokenizer files; "
            f"allowed are {MAX_FILES}"
        )
    return names


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _portable(name: str) -> bool:
    """Fit for the archive: not hidden (`._x` is a Mac's by-product), a plain name everywhere."""
    return name.isprintable() and not name.startswith(".") and not set(name) & set('\\/:*?"<>|')


def _open(root: Path, name: str, stores: tuple[Path, ...]) -> BinaryIO:
    try:
        return open_regular(root, name, stores)
    except RefusedFile as error:
        raise FailedPrecondition(f"tokenizer: file {name!r} {error}") from error
    except FileNotFoundError as error:
        raise FailedPrecondition(
            f"tokenizer: file {name!r} is a link to nothing (an incomplete download?)"
        ) from error
    except OSError as error:
        raise FailedPrecondition(
            f"tokenizer: file {name!r} cannot be read: {error.strerror}"
        ) from error


def _add(archive: zipfile.ZipFile, name: str, file: BinaryIO, size: int) -> None:
    info = zipfile.ZipInfo(name, _EPOCH)
    info.compress_type = zipfile.ZIP_DEFLATED
    info.create_system = 3
    info.external_attr = _MODE
    info.file_size = size
    done = 0
    with archive.open(info, "w") as entry:
        # Full blocks whatever the file system returns: deflate may depend on their borders.
        while block := file.read(_READ_BYTES):
            if not done and block.startswith(_LFS_POINTER):
                raise FailedPrecondition(
                    f"tokenizer: file {name!r} is a git-lfs pointer; its content was not fetched"
                )
            done += len(block)
            if done > size:
                break
            entry.write(block)
    if done != size:
        raise FailedPrecondition(f"tokenizer: file {name!r} changed while it was read")


class _Buffer(io.BytesIO):
    """Memory that refuses to grow past a limit, naming the file that did it."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.name = ""
        self._limit = limit

    def write(self, data: bytes | bytearray | memoryview, /) -> int:  # type: ignore[override]
        if self.tell() + len(data) > self._limit:
            raise FailedPrecondition(
                f"tokenizer: the archive passes {_mib(self._limit)} at file {self.name!r}"
            )
        return super().write(data)


def _mib(count: int) -> str:
    return f"{count / MIB:.1f} MiB"
