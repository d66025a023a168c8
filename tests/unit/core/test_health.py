from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.core.errors import EngineDead, Unavailable
from smg_grpc_servicer.core.health import State, StatusBoard
from smg_grpc_servicer.core.stall import StallRule
from tests.support.wait import until


class Work:
    """Requests in flight, on a clock that the test turns."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.in_flight = 0
        self.last_output: float | None = None
        self.busy_since: float | None = None

    def __call__(self) -> float:
        return self.now

    def arrive(self) -> None:
        self.in_flight += 1
        if self.in_flight == 1:
            self.busy_since = self.now

    def leave(self) -> None:
        self.in_flight -= 1
        if self.in_flight == 0:
            self.busy_since = None


def serving(work: Work, bound: float = 30) -> StatusBoard:
    board = StatusBoard(work, stall_seconds=bound, clock=work)
    board.warming()
    board.serving()
    return board


def test_the_life_of_a_server() -> None:
    board = StatusBoard()
    seen = []
    moves: list[Callable[[], None]] = [board.warming, board.serving, board.draining, board.stopped]
    for move in (lambda: None, *moves):
        move()
        seen.append((board.state.value, board.alive, board.ready, board.accepting, board.reason))
    assert seen == [
        ("loading", True, False, False, "loading"),
        ("warming up", True, False, False, "warming up"),
        ("serving", True, True, True, "serving"),
        ("draining", True, False, False, "draining"),
        ("stopped", False, False, False, "stopped"),
    ]


def test_the_end_is_sticky() -> None:
    """B1: a late "warm-up done" does not bring a draining server back."""
    board = StatusBoard()
    board.draining()
    board.serving()
    board.warming()
    assert board.state is State.DRAINING


def test_death_is_final_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    """O2: both answers go down, the first reason stays."""
    board = serving(Work())
    told = []
    board.subscribe(lambda: told.append(board.reason))
    board.dead("out of memory")
    board.dead("and again")
    board.serving()
    assert told == ["engine dead: out of memory"]
    assert (board.alive, board.ready, board.accepting) == (False, False, False)
    with pytest.raises(EngineDead, match="out of memory"):
        board.require_accepting()
    assert [r.getMessage() for r in caplog.records] == ["engine dead: out of memory"]


def test_refusals_say_why() -> None:
    board = StatusBoard()
    with pytest.raises(Unavailable, match="the server is loading"):
        board.require_accepting()
    board.serving()
    board.require_accepting()
    board.draining()
    with pytest.raises(Unavailable, match="the server is draining"):
        board.require_accepting()


def test_idle_is_never_a_stall() -> None:
    """G2: a server without work may be silent for a day."""
    work = Work()
    board = serving(work)
    work.last_output = work.now
    work.now += 86_400
    board.refresh()
    assert board.ready


def test_silence_counts_from_the_moment_there_is_work() -> None:
    """O1: a request after a quiet day gets the whole bound, not none of it."""
    work = Work()
    board = serving(work)
    work.last_output = work.now
    work.now += 86_400
    work.arrive()
    seen = []
    for seconds in (29, 1):
        work.now += seconds
        board.refresh()
        seen.append((board.ready, board.alive, board.accepting))
    assert seen == [(True, True, True), (False, True, True)]
    assert board.condition == "stalled"
    assert board.reason == "stalled: no output for more than 30 s with 1 requests in flight"


def test_a_busy_engine_that_talks_is_ready() -> None:
    """G2: saturated but emitting: SERVING all the time."""
    work = Work()
    board = serving(work)
    for _ in range(100):
        work.arrive()
        work.now += 29
        work.last_output = work.now
        board.refresh()
        assert board.ready


def test_a_stall_is_logged_once_and_its_end_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    work = Work()
    board = serving(work)
    caplog.clear()
    for _ in range(2):
        work.arrive()
        for _ in range(5):
            work.now += 20
            board.refresh()
        work.last_output = work.now
        board.refresh()
        board.refresh()
        work.leave()
    assert [r.levelname for r in caplog.records] == ["WARNING", "INFO"] * 2


def test_no_bound_no_stall() -> None:
    work = Work()
    board = serving(work, bound=0)
    work.arrive()
    work.now += 1e9
    board.refresh()
    assert board.ready


async def test_no_timer_while_idle() -> None:
    """An idle server wakes up for nothing; a busy one watches until it is idle again."""
    work = Work()
    board = serving(work, bound=0.05)
    board.refresh()
    assert board.statistics()["timers"] == 0
    work.arrive()
    board.request_arrived()
    assert board.statistics()["timers"] == 1
    work.now += 1
    await until(lambda: not board.ready)
    work.leave()
    board.request_left()
    await until(lambda: board.ready)
    assert board.statistics() == {"subscribers": 0, "timers": 0}


async def test_the_timer_goes_with_the_server() -> None:
    work = Work()
    board = serving(work)
    work.arrive()
    board.request_arrived()
    board.draining()
    board.stopped()
    assert board.statistics()["timers"] == 0


async def test_the_drain_hears_of_the_last_request() -> None:
    work = Work()
    board = serving(work)
    work.arrive()
    work.arrive()
    board.draining()
    idle = asyncio.Event()
    end = board.subscribe(lambda: idle.set() if board.in_flight == 0 else None)
    work.leave()
    board.request_left()
    assert not idle.is_set()
    work.leave()
    board.request_left()
    assert idle.is_set()
    end()
    assert board.statistics()["subscribers"] == 0


@given(
    st.lists(st.tuples(st.sampled_from(["arrive", "leave", "output", "wait"]), st.floats(0, 40)))
)
def test_the_rule_against_its_definition(steps: list[tuple[str, float]]) -> None:
    """Stalled exactly when there is work and the silence since output or work is the bound."""
    work = Work()
    rule = StallRule(30)
    for what, seconds in steps:
        if what == "arrive":
            work.arrive()
        elif what == "leave" and work.in_flight:
            work.leave()
        elif what == "output" and work.in_flight:
            work.last_output = work.now
        work.now += seconds
        rule.look(work, work.now)
        quiet_since = max(work.last_output or 0, work.busy_since or 0)
        assert rule.stalled == (work.in_flight > 0 and work.now - quiet_since >= 30)
        wait = rule.next_look(work, work.now)
        assert (wait is None) == (work.in_flight == 0)
        assert wait is None or 0 < wait <= 30
