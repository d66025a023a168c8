"""mlx-lm's per-layer caches, handled as lists: merge rows, join, keep, extract, roll back.

One row uses the plain classes (no mask, integer offsets: measurably faster), several rows their
batch forms. Only public cache methods are used, so it works on mlx-lm 0.31.3 to 0.32.x.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from smg_grpc_servicer.core.errors import ConfigError

Caches = list[Any]

KNOWN_VERSIONS = "mlx-lm 0.31.3 to 0.32.x"
_PLAIN_METHODS = ("size", "is_trimmable", "merge")
_BATCH_METHODS = ("extend", "filter", "extract", "prepare", "finalize", "size")


def make(model: Any) -> Caches:
    """Fresh caches for one row."""
    try:
        from mlx_lm.models.cache import make_prompt_cache
    except ImportError as error:
        raise ConfigError(
            f"mlx_lm.models.cache.make_prompt_cache is missing; known to work: {KNOWN_VERSIONS}"
        ) from error
    caches: Caches = make_prompt_cache(model)
    return caches


def can_batch(model: Any) -> bool:
    """Whether rows can be merged. Raises ConfigError when mlx-lm lacks a piece that needs."""
    if not all(hasattr(cache, "merge") for cache in make(model)):
        return False
    for one, other in zip(make(model), make(model), strict=True):
        _require(one, _PLAIN_METHODS)
        _require(one.merge([one, other]), _BATCH_METHODS)
    return True


def prove(model: Any) -> None:
    """Run a prompt and a step, so that a model that cannot run here says so at the start."""
    caches = make(model)
    mx.eval(model(mx.array([[0, 0]]), cache=caches))
    mx.eval(model(mx.array([[0]]), cache=caches))


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


def keep(model: Any, caches: Caches, rows: int, indices: Sequence[int]) -> Caches:
    """The caches of `indices` alone (at least one)."""
    if len(indices) == rows:
        return caches
    if len(indices) == 1:
        return extract(model, caches, rows, indices[0])
    selected = mx.array(list(indices))
    for cache in caches:
        cache.filter(selected)
    return caches


def extract(model: Any, caches: Caches, rows: int, index: int) -> Caches:
    """One row's plain caches, independent of the batch."""
    if rows == 1:
        return copy.deepcopy(caches)
    if all(cache.empty() for cache in caches):
        # Prompts of one token before their first step; mlx-lm takes no row out of nothing.
        return make(model)
    return [cache.extract(index) for cache in caches]


def part(caches: Caches, rows: int, index: int) -> Caches:
    """One row's plain caches to put away: an exact copy, without room for growing."""
    return [cache.extract(index) for cache in _batched(caches, rows)]


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


def launch(arrays: list[Any]) -> None:
    """Start computing `arrays` without waiting for them."""
    async_eval: Any = mx.async_eval
    async_eval(arrays)


def states(caches: Caches) -> list[Any]:
    """What to evaluate so that the caches hold data instead of a graph."""
    return [cache.state for cache in caches if not cache.empty()]


def _batched(caches: Caches, rows: int) -> Caches:
    return [cache.merge([cache]) for cache in caches] if rows == 1 else caches
