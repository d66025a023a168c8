"""Rows are in step with their tokens, exactly k long, best first, and free of non-numbers."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.vllm.logprobs import FLOOR, output_rows, prompt_rows

Entry = tuple[int, float, int]

OUTSIDE: list[Entry] = [(9, -7.0, 40), (1, -0.5, 1), (2, -1.0, 2), (3, -2.0, 3)]
"""As vLLM lists a position: the sampled token, then ranks 1 to 3."""
INSIDE: list[Entry] = [(2, -1.0, 2), (1, -0.5, 1), (2, -1.0, 2), (3, -2.0, 3)]


def as_dicts(*positions: list[Entry]) -> list[Any]:
    return [{i: SimpleNamespace(logprob=v, rank=r) for i, v, r in entries} for entries in positions]


def as_flat(*positions: list[Entry]) -> Any:
    """Shaped as vLLM's FlatLogprobs."""

    class Flat(SimpleNamespace):
        def __len__(self) -> int:
            return len(self.start_indices)

    flat = Flat(start_indices=[], end_indices=[], token_ids=[], logprobs=[], ranks=[])
    for entries in positions:
        flat.start_indices.append(len(flat.token_ids))
        for token, value, rank in entries:
            flat.token_ids.append(token)
            flat.logprobs.append(value)
            flat.ranks.append(rank)
        flat.end_indices.append(len(flat.token_ids))
    return flat


def merged(*positions: list[Entry]) -> Any:
    """As vLLM's own merging of two flat ones leaves it: what was double is gone."""
    return as_flat(*([(i, e.logprob, e.rank) for i, e in d.items()] for d in as_dicts(*positions)))


SHAPES = pytest.mark.parametrize("shape", [as_dicts, as_flat, merged])


@SHAPES
def test_a_row_has_the_k_best_and_the_token_its_own_value(shape: Any) -> None:
    """V5: vLLM lists the sampled token first, inside the best k or on top of them."""
    rows = output_rows(shape(OUTSIDE, INSIDE), [9, 2], 3)
    assert rows.values == [-7.0, -1.0]
    assert rows.top_ids == [[1, 2, 3], [1, 2, 3]]
    assert rows.top_values == [[-0.5, -1.0, -2.0]] * 2


@SHAPES
def test_all_means_every_entry_once(shape: Any) -> None:
    """V5: -1 asks for the whole vocabulary."""
    rows = output_rows(shape(INSIDE), [2], -1)
    assert rows.top_ids == [[1, 2, 3]]
    assert rows.values == [-1.0]


@SHAPES
def test_none_means_the_value_alone(shape: Any) -> None:
    rows = output_rows(shape(OUTSIDE[:1]), [9], 0)
    assert (rows.values, rows.top_ids, rows.top_values) == ([-7.0], [[]], [[]])


@SHAPES
def test_a_missing_token_keeps_its_place(shape: Any) -> None:
    """V5: the sampled token is not among the entries, or a whole position is not there."""
    rows = output_rows(shape(OUTSIDE[1:], OUTSIDE), [9, 9, 5], 3)
    assert rows.values == [FLOOR, -7.0, FLOOR]
    assert rows.top_ids == [[1, 2, 3], [1, 2, 3], []]
    assert len(rows) == 3


@SHAPES
@pytest.mark.parametrize("bad", [math.nan, -math.inf])
def test_no_value_is_anything_but_a_number(shape: Any, bad: float) -> None:
    """F6: rank -1, minus infinity and NaN come from engines; JSON has none of them."""
    entries = [(9, bad, -1), (1, bad, 1), (2, -0.5, 2)]
    rows = output_rows(shape(entries), [9], 2)
    assert rows.values == [FLOOR]
    assert sorted(rows.top_values[0]) == [FLOOR, -0.5]


def test_an_unknown_rank_does_not_disturb_the_order() -> None:
    """F6: under speculative decoding vLLM reports rank -1."""
    rows = output_rows(as_dicts([(2, -1.0, -1), (1, -0.5, 1), (3, -2.0, 3)]), [2], 3)
    assert rows.top_ids == [[1, 2, 3]]


@SHAPES
def test_the_first_prompt_token_has_no_value(shape: Any) -> None:
    rows = prompt_rows(shape([], OUTSIDE, INSIDE), [5, 9, 2], 3)
    assert rows.values == [None, -7.0, -1.0]
    assert rows.top_ids == [[], [1, 2, 3], [1, 2, 3]]
    assert rows.token_ids == [5, 9, 2]


def test_vllms_own_none_is_the_first_position() -> None:
    assert prompt_rows([None, *as_dicts(OUTSIDE)], [5, 9], 3).values == [None, -7.0]
