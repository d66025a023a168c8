"""Finds a model in the local Hugging Face cache; never touches the network.

Layout (huggingface_hub, "Understand caching"): `<cache>/models--ORG--NAME/` holds
`refs/<branch or tag>` (a file with a commit), `snapshots/<commit>/<file>` (links) and
`blobs/<etag>` (what they lead to). Since huggingface_hub 2.x a blob may itself be a link into
`<cache>/blobs/<2 hex>/<hash>`, a store shared by all models that carries a marker file.
Raises `FailedPrecondition` with the reason when a model is not there.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path

from smg_grpc_servicer.core.errors import FailedPrecondition
from smg_grpc_servicer.core.redaction import redact_text

SHARED_STORE_MARKER = ".huggingface-shared-blobs"

_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_])?"
_HUB_ID = re.compile(rf"{_PART}(?:/{_PART})?")
_COMMIT = re.compile(r"[0-9a-f]{40}")


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """The hub cache that huggingface_hub would use with these variables."""

    def expanded(path: str) -> Path:
        return _home(os.path.expandvars(path))

    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if value := environ.get(name):
            return expanded(value)
    if home := environ.get("HF_HOME"):
        return expanded(home) / "hub"
    return expanded(environ.get("XDG_CACHE_HOME") or "~/.cache") / "huggingface" / "hub"


def resolve(model: str | os.PathLike[str], revision: str | None = None) -> Path:
    """The real directory of `model`: a local directory, or a hub id that is in the cache.

    A local directory wins, as it does in every loader. `revision` is a branch, a tag or a
    commit of a hub id (`main` when None) and has no meaning for a directory.
    """
    text = os.fspath(model)
    shown = redact_text(text)
    if not text.strip() or "\0" in text:
        raise FailedPrecondition("tokenizer: the model has no tokenizer path")
    local = _home(text)
    try:
        if local.is_dir():
            return Path(os.path.realpath(local))
        if local.exists():
            raise FailedPrecondition(f"tokenizer: {shown!r} is a file; a directory is needed")
    except OSError as error:
        raise FailedPrecondition(
            f"tokenizer: {shown!r} cannot be read: {error.strerror}"
        ) from error
    if not _HUB_ID.fullmatch(text) or "--" in text or ".." in text:
        raise FailedPrecondition(
            f"tokenizer: {shown!r} is neither a local directory nor a hub id (ORG/NAME)"
        )
    return _snapshot(text, revision)


def blob_stores(directory: Path) -> tuple[Path, ...]:
    """Where links of the model in `directory` (a real path) may lead besides itself.

    A snapshot may use its own repository's blobs. A directory made by a hub download with links
    (`local_dir`) may use those of the models in the cache. Both may use the shared store.
    """
    if directory.parent.name == "snapshots" and directory.parent.parent.name.startswith("models--"):
        repository = directory.parent.parent
        cache, own = repository.parent, [repository / "blobs"]
    else:
        cache = Path(os.path.realpath(cache_dir()))
        own = sorted(cache.glob("models--*/blobs"))
    if (cache / "blobs" / SHARED_STORE_MARKER).is_file():
        own.append(cache / "blobs")
    return tuple(Path(os.path.realpath(store)) for store in own if store.is_dir())


def _home(path: str) -> Path:
    try:
        return Path(path).expanduser()
    except RuntimeError:  # "~name" of nobody
        return Path(path)


def _snapshot(hub_id: str, revision: str | None) -> Path:
    repository = cache_dir() / ("models--" + hub_id.replace("/", "--"))
    if not repository.is_dir():
        raise FailedPrecondition(
            f"tokenizer: hub model {hub_id!r} is not in the local cache {str(cache_dir())!r} "
            "(this server downloads nothing on request)"
        )
    wanted = revision or "main"
    commit = wanted if _COMMIT.fullmatch(wanted) else _read_ref(repository, wanted)
    snapshot = repository / "snapshots" / commit if commit else None
    if snapshot is None or not snapshot.is_dir():
        raise FailedPrecondition(
            f"tokenizer: revision {wanted!r} of hub model {hub_id!r} is not in the local cache"
        )
    return Path(os.path.realpath(snapshot))


def _read_ref(repository: Path, name: str) -> str | None:
    if name.startswith("/") or any(part in ("", ".", "..") for part in name.split("/")):
        return None
    try:
        with (repository / "refs" / name).open(encoding="ascii") as file:
            commit = file.read(64).strip()
    except (OSError, ValueError):
        return None
    return commit if _COMMIT.fullmatch(commit) else None
