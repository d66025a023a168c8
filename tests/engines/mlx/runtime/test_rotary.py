"""Rotary angles that a model's layers share: the same numbers, computed once."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest
from mlx_lm.models.cache import KVCache

from smg_grpc_servicer.mlx.runtime import rotary
from smg_grpc_servicer.mlx.runtime.job import Job
from tests.support.mlx_loop import GREEDY, generate, running

OFFSETS: dict[str, Any] = {
    "one row": 17,
    "the first token": 0,
    "far": 100_000,
    "rows": mx.array([3, 17, 250, 100_000]),
    "a row of a batch": mx.array([9]),
    "left padding": mx.array([-2, 0, 5, 1]),
}


@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("where", OFFSETS)
@pytest.mark.parametrize("scale", [1.0, 0.25])
def test_the_numbers_are_mlx_own(where: str, tokens: int, scale: float) -> None:
    offset = OFFSETS[where]
    rows = 1 if isinstance(offset, int) else offset.size
    plain = nn.RoPE(32, base=5e5, scale=scale)
    shared = rotary.SharedRoPE(32, base=5e5, scale=scale)
    shared.angles = rotary.Angles()
    x, y = mx.random.normal((2, rows, 3, tokens, 32))
    with shared.angles:
        assert mx.array_equal(shared(x, offset), plain(x, offset))
        assert mx.array_equal(shared(y, offset), plain(y, offset))
    assert mx.array_equal(shared(x, offset), plain(x, offset))


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A one for every time that angles are computed."""
    times: list[int] = []
    plain = rotary._angles

    def counted(*args: Any) -> Any:
        times.append(1)
        return plain(*args)

    monkeypatch.setattr(rotary, "_angles", counted)
    return times


def test_they_are_computed_once_a_step(
    tiny: Any, prompts: list[list[int]], computed: list[int]
) -> None:
    with running(tiny.model) as (loop, sink):
        begin = len(computed)
        loop.submit(Job("one", prompts[0], 20, GREEDY))
        sink.ended("one")
        assert len(computed) - begin == loop.counters()["steps_total"] == 20
        generate(loop, sink, prompts[:4], 20, "more")
        assert len(computed) - begin == loop.counters()["steps_total"]


class Odd(nn.Module):  # type: ignore[misc]
    """Its second layer counts positions from elsewhere."""

    def __init__(self, shift: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.ropes = [nn.RoPE(8), nn.RoPE(8)]
        self.layers = [None, None]
        self.shift = shift

    def make_cache(self) -> list[KVCache]:
        return [KVCache(), KVCache()]

    def __call__(self, inputs: mx.array, cache: list[Any]) -> mx.array:
        x = self.embedding(inputs)[:, None]
        for at, (rope, layer) in enumerate(zip(self.ropes, cache, strict=True)):
            where = layer.offset + at * self.shift
            layer.update_and_fetch(x, x)
            x = rope(x, offset=where)
        return x[:, 0]


@pytest.mark.parametrize("shift", [0, 3])
def test_layers_at_other_positions_do_not_share(shift: int, computed: list[int]) -> None:
    model = Odd(shift)
    rotary.share(model)
    assert {type(rope) for rope in model.ropes} == {nn.RoPE if shift else rotary.SharedRoPE}
    assert len(computed) == 1


def test_a_model_that_runs_no_two_rows_is_left_alone() -> None:
    model = Odd(0)

    def refuse(inputs: mx.array) -> mx.array:
        if len(inputs) > 1:
            raise ValueError("one row only")
        return nn.Embedding(16, 8)(inputs)

    model.embedding = refuse
    rotary.share(model)
    assert {type(rope) for rope in model.ropes} == {nn.RoPE}
