"""Which requests are planned, for any engine."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.warmup import plan as planning
from smg_grpc_servicer.warmup.plan import NOTHING, ONE, Plan, Shape, Shot, make, quicker, request

GPU = Shape(
    step_tokens=8192,
    context=32768,
    vocab=151936,
    window=256,
    captured=(1, 2, 4, 8, 24, 136, 512),
)
SIZES = st.integers(1, 40000)
SHAPES = st.builds(
    Shape,
    step_tokens=SIZES,
    context=SIZES,
    vocab=st.integers(1, 200000),
    window=st.none() | st.integers(1, 4096),
    captured=st.lists(st.integers(1, 1024), max_size=8).map(tuple),
    ranks=st.integers(2, 16).map(lambda count: tuple(range(count))) | st.just(()),
    reserve=st.integers(0, 8),
)


def shots(plan: Plan) -> list[Shot]:
    steps = (*plan.opening, *plan.grid, *plan.rest)
    return [shot for step in steps for shot in step.shots]


def lengths(plan: Plan) -> set[int]:
    return {shot.prompt_tokens for shot in shots(plan) if shot.output_tokens == 1}


@given(SHAPES, st.sampled_from(["fast", "full"]))
def test_every_engine_can_take_what_is_planned_for_it(shape: Shape, level: str) -> None:
    plan = make(level, shape)
    assert shape.step_tokens is not None
    assert shape.context is not None
    for step in (*plan.grid, *plan.rest):
        assert 1 <= len(step.shots) <= planning.MOST
        per_rank = Counter(shot.rank for shot in step.shots)
        assert set(per_rank) == set(shape.ranks or (None,))
        assert len(set(per_rank.values())) == 1
        assert max(per_rank.values()) <= (shape.window or planning.WINDOW)
        for shot in step.shots:
            assert shot.prompt_tokens <= shape.step_tokens
            assert shot.prompt_tokens + shot.output_tokens <= shape.context - shape.reserve
            assert min(shot.prompt_tokens, shot.output_tokens) >= 1
    again = make(level, shape)
    assert again == plan


@given(SHAPES)
def test_full_goes_beyond_fast_and_does_nothing_twice(shape: Shape) -> None:
    fast, full = make("fast", shape), make("full", shape)
    assert full.grid == fast.grid
    assert not fast.rest
    assert len({step.name for step in full.rest}) == len(full.rest)
    assert not lengths(Plan(rest=full.rest)) & lengths(Plan(grid=full.grid))


@given(st.integers(0, 10**6), st.integers(1, 200000), st.integers(1, 64))
def test_prompts_are_words_and_neighbours_begin_unlike(number: int, vocab: int, size: int) -> None:
    made = request(number, Shot(size, 3, 1), vocab)
    assert made == request(number, Shot(size, 3, 1), vocab)
    assert made.request_id == f"smg-warmup-{number}"
    assert (len(made.prompt), made.output_tokens, made.rank) == (size, 3, 1)
    assert all(0 <= token < vocab for token in made.prompt)
    if vocab > 2000:
        assert all(1000 <= token < 31000 for token in made.prompt)
    if vocab > 3:
        assert made.prompt[0] != request(number + 1, Shot(size, 3), vocab).prompt[0]


def test_a_batch_shrinks_over_every_size() -> None:
    """At the price of twice the window and not of its square."""
    step = make("fast", GPU).grid[0]
    left = sorted(shot.output_tokens for shot in step.shots)
    assert len(left) == 256
    running = {sum(1 for tokens in left if tokens > done) for done in range(max(left))}
    assert running >= {1, 2, 4, 8, 16, 32, 64, 128, 256}
    assert sum(left) < 256 * 12
    finer = make("full", GPU).rest[0]
    running = {sum(1 for shot in finer.shots if shot.output_tokens > done) for done in range(1, 40)}
    assert running >= {1, 2, 4, 8, 24, 136, 256}


def test_prompts_have_the_lengths_that_kernels_differ_by() -> None:
    fast, full = lengths(make("fast", GPU)), lengths(make("full", GPU))
    assert {1, 2, 256, 512, 768, 2048, 2560, 4096, 8192} <= fast
    assert full - fast >= {384, 136, 17, 513, 8192 - 128}
    assert max(full) == 8192
    assert max(lengths(make("fast", Shape(300, 200, 1000, reserve=6)))) == 193


def test_the_first_request_comes_before_all_measuring() -> None:
    plan = make("full", GPU)
    assert plan.opening == ONE
    assert make("full", GPU, opened=True).opening == ()
    assert plan.steps == 1 + 2 * len(plan.grid) + len(plan.rest)


@pytest.mark.parametrize("level", ["fast", "full"])
def test_a_level_that_was_asked_for_is_honoured(level: str) -> None:
    assert make(level, GPU, "on a CPU there is no more to make") == make(level, GPU)


def test_auto_is_full_where_that_gains_something() -> None:
    assert make("auto", GPU) == make("full", GPU)
    plan = make("auto", GPU, "on a CPU there is no more to make")
    assert plan.about == "one request, on a CPU there is no more to make"
    assert (plan.opening, plan.grid, plan.rest) == (ONE, (), ())


def test_off_is_nothing() -> None:
    assert make("off", GPU) == NOTHING
    assert NOTHING.steps == 0


@pytest.mark.parametrize("shape", [Shape(None, 10, 10), Shape(10, None, 10), Shape(10, 10, None)])
def test_an_engine_that_does_not_say_what_it_takes_gets_one_request(shape: Shape) -> None:
    plan = make("full", shape)
    assert plan.steps == 1
    made = request(0, plan.opening[0].shots[0], plan.vocab)
    assert len(made.prompt) == 1


@pytest.mark.parametrize(
    ("before", "after", "gained"),
    [
        ([1.0, 0.10], [0.2, 0.10], True),
        ([1.0, 0.10], [0.9, 0.10], False),
        ([0.02, 0.01], [0.001, 0.001], False),
        ([None, 1.0], [0.5, 1.0], False),
        ([1.0], [None], False),
        ([], [], False),
    ],
)
def test_quicker(before: list[float | None], after: list[float | None], gained: bool) -> None:
    assert quicker(before, after) is gained
