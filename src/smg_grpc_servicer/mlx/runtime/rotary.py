"""Rotary angles once a step, not twice a layer: for mlx on a CPU.

There `mx.fast.rope` is made of plain operations and computes the same cosines and sines anew for
the queries and the keys of every layer, a tenth of a small model's step; a GPU has a kernel for it.
The formula is that of mlx's own `fast.cpp`, operation by operation: results are equal to the bit.
"""

from __future__ import annotations

import logging
import math
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from smg_grpc_servicer.mlx.runtime import caches as kv

log = logging.getLogger(__name__)


class Angles:
    """A context for one call of the model, in which all its layers are at the same positions."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[mx.array, mx.array]] | None = None

    def __enter__(self) -> None:
        self._known = {}

    def __exit__(self, *error: object) -> None:
        self._known = None

    def rotated(self, rope: nn.RoPE, x: mx.array, offset: Any) -> mx.array | None:
        """`x` [rows, heads, tokens, dims] rotated; None where the plain way has to be gone."""
        if self._known is None or x.ndim != 4 or x.dtype != mx.float32 or x.shape[-1] != rope.dims:
            return None
        # An offset of a batch is an array of each layer's own; their values are the same.
        where = offset if isinstance(offset, int) else offset.shape
        key = (rope.dims, rope.base, rope.scale, x.shape[2], where)
        if key not in self._known:
            self._known[key] = _angles(rope, x.shape[2], offset)
        cosines, sines = self._known[key]
        first, second = mx.split(x, 2, axis=-1)
        return x * cosines + mx.concatenate([second, first], axis=-1) * sines


def _angles(rope: nn.RoPE, tokens: int, offset: Any) -> tuple[mx.array, mx.array]:
    """Cosines and signed sines [rows or 1, 1, tokens, dims]."""
    half = rope.dims // 2
    if not isinstance(offset, int) and offset.size > 1:
        offset = mx.expand_dims(offset, (-1, -2))
    positions = (mx.arange(tokens, dtype=mx.float32) + offset) * mx.array(rope.scale, mx.float32)
    step = mx.array(math.log(rope.base) / half, mx.float32)
    frequencies = mx.exp(mx.arange(0, -half, -1, dtype=mx.float32) * step)
    theta = mx.expand_dims(positions, -1) * frequencies
    cosines, sines = mx.cos(theta), mx.sin(theta)
    return mx.concatenate([cosines, cosines], -1), mx.concatenate([-sines, sines], -1)


class SharedRoPE(nn.RoPE):  # type: ignore[misc]
    """`nn.RoPE`, whose angles others of its model may have computed already."""

    angles: Angles

    def __call__(self, x: mx.array, offset: Any = 0) -> mx.array:
        rotated = self.angles.rotated(self, x, offset)
        if rotated is not None:
            return rotated
        plain: mx.array = super().__call__(x, offset=offset)
        return plain


def share(model: Any) -> Angles:
    """Let the model's layers share their angles, where that gives what it gave before."""
    angles = Angles()
    ropes = [
        module
        for module in model.modules()
        if type(module) in (nn.RoPE, SharedRoPE) and not module.traditional
    ]
    for rope in ropes:
        rope.__class__ = SharedRoPE
        rope.angles = angles
    if ropes and not _is_right(model, angles):
        log.debug("this model's layers cannot share rotary angles")
        for rope in ropes:
            rope.__class__ = nn.RoPE
    return angles


def _is_right(model: Any, angles: Angles) -> bool:
    """A step of two rows of unequal lengths with the angles shared, held against one without."""
    try:
        return _is_equal(model, angles)
    except Exception as error:  # requests will tell, if any comes to this
        log.debug("this model does not run two rows: %s", error)
        return False


def _is_equal(model: Any, angles: Angles) -> bool:
    def rows() -> kv.Caches:
        rows = []
        for length in (3, 2):
            caches = kv.make(model)
            model(mx.array([[0] * length]), cache=caches)
            rows.append(caches)
        return kv.merge(rows)

    inputs = mx.array([[0], [0]])
    plain = model(inputs, cache=rows())
    caches = rows()
    with angles:
        shared = model(inputs, cache=caches)
    return bool(mx.array_equal(plain, shared, equal_nan=True).item())
