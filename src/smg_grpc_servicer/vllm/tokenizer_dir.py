"""The directory of a model's tokenizer files, for a server that cannot ask vLLM for them.

A local directory, else the snapshot of a hub id in the local cache; a hub id that is not there yet
is downloaded with the client library that vLLM brings, tokenizer and configuration files only.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from smg_grpc_servicer.core.errors import FailedPrecondition
from smg_grpc_servicer.core.hub_cache import resolve
from smg_grpc_servicer.core.tokenizer import COMPANION_FILES, TOKENIZER_FILES
from smg_grpc_servicer.vllm.probe import text

log = logging.getLogger(__name__)


def tokenizer_dir(vllm_config: Any) -> Path | None:
    """None (and a line that says what then does not work) when there is none."""
    model = vllm_config.model_config
    name = text(model, "tokenizer") or model.model
    revision = text(model, "tokenizer_revision")
    reason = ""
    for look in (resolve, _download):
        try:
            directory = look(name, revision)
        except FailedPrecondition as error:
            reason = reason or str(error)
            continue
        if _has_tokenizer(directory):
            return directory
        reason = f"no tokenizer file in {str(directory)!r}"
    log.warning("%s: stop strings are refused and GetTokenizer answers FAILED_PRECONDITION", reason)
    return None


def _download(name: str, revision: str | None) -> Path:
    """A snapshot with the tokenizer's files in it, from the hub if it has to be.

    :raises FailedPrecondition: no hub id, no network, no such model.
    """
    if Path(name).exists():
        raise FailedPrecondition(f"tokenizer: {name!r} has no tokenizer files")
    try:
        from huggingface_hub import snapshot_download

        fetch: Callable[..., str] = snapshot_download
        found = fetch(name, revision=revision, allow_patterns=[*TOKENIZER_FILES, *COMPANION_FILES])
    except Exception as error:  # its errors come from three libraries
        raise FailedPrecondition(f"tokenizer: {name!r} cannot be downloaded: {error}") from error
    return Path(found)


def _has_tokenizer(directory: Path) -> bool:
    return any(
        fnmatchcase(file.name, pattern)
        for file in directory.iterdir()
        for pattern in TOKENIZER_FILES
    )
