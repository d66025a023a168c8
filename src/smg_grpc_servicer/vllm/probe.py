"""Reading an engine's configuration without hiding that a field has moved.

`probe(config, "cache_config.block_size")` walks attributes. A missing one is None and is logged
once per path: on a version that should have it, that line is the news. A present None is just
unknown.
"""

from __future__ import annotations

import logging

log = logging.getLogger(__name__)

_MISSING = object()
_told: set[str] = set()


def probe(root: object, path: str) -> object:
    """The value at a dotted path; None when unset anywhere on the way or not there at all."""
    value = root
    for name in path.split("."):
        if value is None:
            return None
        owner, value = value, getattr(value, name, _MISSING)
        if value is _MISSING:
            _tell(type(owner).__name__, name, path)
            return None
    return value


def text(root: object, path: str) -> str | None:
    """A non-empty text at a path."""
    value = probe(root, path)
    return value if isinstance(value, str) and value else None


def positive(root: object, path: str) -> int | None:
    """A positive integer at a path."""
    value = probe(root, path)
    return value if type(value) is int and value > 0 else None


def _tell(owner: str, name: str, path: str) -> None:
    if path not in _told:
        _told.add(path)
        log.warning("this vLLM's %s has no %r: %s stays unknown", owner, name, path)
