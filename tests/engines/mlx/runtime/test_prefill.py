"""Two lanes: nobody waits for a long prompt, and the long prompt gets its turn."""

from __future__ import annotations

from typing import Any

from smg_grpc_servicer.mlx.runtime.job import Job, Row, make_row
from smg_grpc_servicer.mlx.runtime.prefill import Budget, plan_group
from tests.support.mlx_loop import GREEDY, running

LONG = [3 + (i * 29) % 500 for i in range(601)]
BUDGET = Budget(busy=256, idle=512, rows=8)


def rows(*lengths: int) -> list[Row]:
    return [make_row(Job(str(i), [1] * (n + 1), 5), i) for i, n in enumerate(lengths)]


def planned(waiting: list[Row], places: int = 32, budget: Budget = BUDGET) -> list[int]:
    return [row.prompt_length - 1 for row in plan_group(waiting, places, budget)]


def test_a_group_is_bounded_by_rows_places_budget_and_padding() -> None:
    assert planned(rows(*[10] * 12)) == [10] * 8
    assert planned(rows(*[10] * 12), places=3) == [10] * 3
    assert planned(rows(*[100] * 12)) == [100, 100]
    assert planned(rows(256, 256)) == [256]
    assert planned(rows(10, 200, 12, 36, 11)) == [10, 12, 36, 11]
    assert planned(rows(60, 10, 60)) == [60, 60]
    assert planned(rows(0, 0, 16)) == [0, 0, 16]


def test_a_row_that_failed_in_a_group_is_tried_alone() -> None:
    waiting = rows(10, 10, 10)
    waiting[1].alone = True
    assert planned(waiting) == [10, 10]
    assert planned(waiting[1:]) == [10]


def test_short_prompts_do_not_wait_for_a_long_one(tiny: Any) -> None:
    """Lockstep prefill held ten-token prompts up for a 4,000-token one (P7)."""
    with running(tiny.model, prefill_budget=32, idle_prefill_budget=64) as (loop, sink):
        loop.submit(Job("long", LONG, 3, GREEDY))
        for i in range(4):
            loop.submit(Job(f"short-{i}", LONG[i : i + 10], 3, GREEDY))
        sink.ended("long", *(f"short-{i}" for i in range(4)))
    assert sink.order.index("long") > max(sink.order.index(f"short-{i}") for i in range(4))


def test_a_running_row_goes_on_during_a_long_prompt(tiny: Any) -> None:
    with running(tiny.model, prefill_budget=32, idle_prefill_budget=64) as (loop, sink):
        loop.submit(Job("running", [5, 6, 7], 200, GREEDY))
        sink.tokens("running", 2)
        loop.submit(Job("long", LONG, 3, GREEDY))
        sink.ended("long", "running")
    before = sink.order[: sink.order.index("long")].count("running")
    assert before >= len(LONG) // 32


def test_a_stream_of_short_prompts_does_not_starve_a_long_one(tiny: Any) -> None:
    """With one place to fill, the older prompt goes first."""
    with running(tiny.model, prefill_budget=32, completion_batch_size=1) as (loop, sink):
        loop.submit(Job("running", [5, 6, 7], 30, GREEDY))
        sink.tokens("running", 1)
        loop.submit(Job("long", LONG, 3, GREEDY))
        for i in range(6):
            loop.submit(Job(f"short-{i}", [4 + i], 3, GREEDY))
        sink.ended("long", *(f"short-{i}" for i in range(6)))
    assert sink.order.index("long") < sink.order.index("short-0")


def test_a_hit_moves_a_long_prompt_to_the_short_lane(tiny: Any) -> None:
    with running(tiny.model, prefill_budget=32, idle_prefill_budget=32) as (loop, sink):
        loop.submit(Job("first", LONG, 2, GREEDY))
        sink.ended("first")
        loop.submit(Job("cold", list(reversed(LONG)), 2, GREEDY))
        loop.submit(Job("warm", LONG, 2, GREEDY))
        sink.ended("cold", "warm")
    assert sink.order.index("warm") < sink.order.index("cold")
