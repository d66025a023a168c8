"""mlx-lm's per-layer caches, handled as lists: merge rows, join, keep, extract, roll back.

One row uses the plain classes (no mask, integer offsets: measurably faster), several rows their
batch forms. Only public cache methods are used, so it works on mlx-lm 0.31.2 to 0.32.x.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

from smg_grpc_servicer.core.errors import ConfigError

Caches = list[Any]

KNOWN_VERSIONS = "mlx-lm 0.31.2 to 0.32.x"
_PLAIN_METHODS = ("size", "is_trimmable", "merge")
_BATCH_METHODS = ("extend", "filter", "extract", "prepare", "finalize", "size")


def probe(model: Any) -> tuple[Caches, bool]:
    """Fresh caches of the model and whether rows of it can be batched.

    Raises ConfigError when mlx-lm lacks a piece that batching needs.
    """
    try:
        from mlx_lm.models.cache import make_prompt_cache
    except ImportError as error:
        raise ConfigError(
            f"mlx_lm.models.cache.make_prompt_cache is missing; known to work: {KNOWN_VERSIONS}"
        ) from error
    caches: Caches = make_prompt_cache(model)
    if not all(hasattr(c, "merge") for c in caches):
        return caches, False
    for cache in caches:
        _require(cache, _PLAIN_METHODS)
        _require(cache.merge([cache, cache]), _BATCH_METHODS)
    return caches, True


def _require(cache: Any, methods: Sequence[str]) -> None:
    missing = [m for m in methods if not hasattr(cache, m)]
    if missing:
        raise ConfigError(
            f"mlx_lm.models.cache.{type(cache).__name__} has no {', '.join(missing)};"
            f" known to work: {KNOWN_VERSIONS}"
        )


def merge(rows: Sequence[Caches]) -> Caches:
    """One batch of several rows' plain caches; a single row stays plain."""
    if len(rows) == 1:
        return rows[0]
    return [layer[0].merge(list(layer)) for layer in zip(*rows, strict=True)]


def join(old: Caches, old_rows: int, new: Caches, new_rows: int) -> Caches:
    """`old` with `new` appended; either may be plain (one row) or a batch."""
    if old_rows == 0:
        return new
    grown = _batched(old, old_rows)
    for mine, other in zip(grown, _batched(new, new_rows), strict=True):
        mine.extend(other)
    return grown


def keep(caches: Caches, rows: int, indices: Sequence[int]) -> Caches:
    """The caches of `indices` alone (at least one)."""
    if len(indices) == rows:
        return caches
    if len(indices) == 1:
        return extract(caches, rows, indices[0])
    import mlx.core as mx

    selected = mx.array(list(indices))
    for cache in caches:
        cache.filter(selected)
    return caches


def extract(caches: Caches, rows: int, index: int) -> Caches:
    """One row's plain caches, independent of the batch."""
    if rows == 1:
        return copy.deepcopy(caches)
    return [cache.extract(index) for cache in caches]


def sizes(caches: Caches) -> list[int]:
    return [cache.size() for cache in caches]


def roll_back(caches: Caches, before: Sequence[int]) -> bool:
    """Trim each layer to its size `before`; False when a layer cannot be trimmed.

    Layers behind the one that failed have not grown, so each is trimmed by its own growth.
    """
    if not all(cache.is_trimmable() for cache in caches):
        return False
    for cache, size in zip(caches, before, strict=True):
        grown = cache.size() - size
        if grown > 0:
            cache.trim(grown)
    return True


def states(caches: Caches) -> list[Any]:
    """What to evaluate so that the caches hold data instead of a graph."""
    return [cache.state for cache in caches if not cache.empty()]


def _batched(caches: Caches, rows: int) -> Caches:
    return [cache.merge([cache]) for cache in caches] if rows == 1 else caches
