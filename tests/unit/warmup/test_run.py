"""How a plan is carried out; time is what the engine below says it takes."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import pytest

from smg_grpc_servicer.warmup.plan import NOTHING, ONE, Plan, Request, Shot, Step
from smg_grpc_servicer.warmup.run import Outcome, run
from tests.support.wait import until


def step(name: str, *lengths: int) -> Step:
    return Step(name, tuple(Shot(length, 1) for length in lengths))


PLAN = Plan("full", 1000, ONE, (step("two", 2, 3), step("five", 5)), (step("rest", 7),))
ROUND = [2, 3, 5]


class Engine:
    """Takes as long as `cost` says, by its own clock; what it was asked, by prompt length."""

    def __init__(self, cost: Callable[[int], float] = lambda seen: 0.0) -> None:
        self.now = 0.0
        self.asked: list[Request] = []
        self.flushed = 0
        self._cost = cost

    async def send(self, request: Request) -> None:
        self.asked.append(request)
        self.now += self._cost(self.lengths.count(len(request.prompt)))

    async def flush(self) -> None:
        self.flushed += 1

    @property
    def lengths(self) -> list[int]:
        return [len(request.prompt) for request in self.asked]

    async def run(self, plan: Plan, seconds: float = 60.0) -> Outcome:
        return await run(plan, self.send, seconds=seconds, flush=self.flush, clock=lambda: self.now)


class Mute:
    """Answers nobody; `out` are those who wait."""

    def __init__(self) -> None:
        self.out: set[str] = set()

    async def send(self, request: Request) -> None:
        self.out.add(request.request_id)
        try:
            await asyncio.Event().wait()
        finally:
            self.out.remove(request.request_id)


async def test_all_of_it_where_the_second_round_is_quicker(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine(lambda seen: 1.0 if seen == 1 else 0.1)
    outcome = await engine.run(PLAN)
    assert engine.lengths == [1, *ROUND, *ROUND, 7]
    ids = [request.request_id for request in engine.asked]
    assert ids == [f"smg-warmup-{number}" for number in range(8)]
    assert outcome == Outcome(answered=8, failed=0, steps=6)
    assert "warm-up: 8 answered, 0 failed, in 5.3 s" in caplog.text
    assert "warm-up: full, 60 s at most" in caplog.text
    assert engine.flushed == 1


async def test_no_more_than_two_rounds_where_the_second_is_no_quicker() -> None:
    engine = Engine(lambda seen: 1.0)
    outcome = await engine.run(PLAN)
    assert engine.lengths == [1, *ROUND, *ROUND]
    assert outcome.ended == "a second round was no quicker than the first"


async def test_requests_of_a_step_run_together() -> None:
    meeting = [asyncio.Event() for _ in range(3)]

    async def send(request: Request) -> None:
        meeting[len(request.prompt) - 1].set()
        await asyncio.gather(*(each.wait() for each in meeting))

    outcome = await run(Plan("fast", 1000, (step("all", 1, 2, 3),)), send, seconds=20)
    assert outcome.answered == 3


async def test_nothing_is_nothing(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    engine = Engine()
    assert await engine.run(NOTHING) == Outcome()
    assert caplog.text == ""
    await engine.run(Plan("one request, and that was it"))
    assert "warm-up: one request, and that was it" in caplog.text
    assert engine.asked == []
    assert engine.flushed == 0


async def test_one_request_leaves_the_cache_alone() -> None:
    engine = Engine()
    assert (await engine.run(Plan("one request", 1000, ONE))).answered == 1
    assert engine.flushed == 0


async def test_an_engine_that_never_answers_costs_the_budget(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The budget bounds it; what is out then is cancelled, and serving goes on."""
    engine = Mute()
    outcome = await run(PLAN, engine.send, seconds=0.05)
    assert outcome.ended == "its 0.05 s are over"
    assert outcome.answered == outcome.failed == 0
    assert engine.out == set()
    assert caplog.records[-1].levelno == logging.WARNING


async def test_a_refused_request_is_told_and_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    """One length that the engine does not take costs that length and nothing else."""
    engine = Engine(lambda seen: 1.0 if seen == 1 else 0.1)

    async def send(request: Request) -> None:
        await engine.send(request)
        if len(request.prompt) == 3:
            raise ValueError("three is not for us")

    outcome = await run(PLAN, send, seconds=60, clock=lambda: engine.now)
    assert engine.lengths == [1, *ROUND, *ROUND, 7]
    assert (outcome.answered, outcome.failed) == (6, 2)
    assert "1 of 2 requests of the step 'two' failed: three is not for us" in caplog.text


async def test_an_engine_that_refuses_everything_is_left_alone() -> None:
    """Three steps of it, not a budget full."""
    asked = []

    async def send(request: Request) -> None:
        asked.append(request)
        raise RuntimeError

    outcome = await run(PLAN, send, seconds=60)
    assert len(asked) == 4
    assert outcome.ended == "of 3 steps in a row nothing was answered"


async def test_a_stop_cancels_what_is_out() -> None:
    """SIGTERM is a cancellation: it goes through, and no request is left behind."""
    engine = Mute()
    flushed: list[bool] = []

    async def flush() -> None:
        flushed.append(True)

    plan = Plan("fast", 1000, (), (step("many", *range(1, 33)),))
    warming = asyncio.create_task(run(plan, engine.send, seconds=600, flush=flush))
    await until(lambda: len(engine.out) == 32)
    warming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await warming
    assert engine.out == set()
    assert flushed == []


async def test_a_cache_that_cannot_be_flushed_is_no_reason_to_fail(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)

    async def flush() -> None:
        raise RuntimeError("in use")

    plan = Plan("fast", 1000, (), (step("one", 1),))
    outcome = await run(plan, Engine().send, seconds=60, flush=flush)
    assert outcome.answered == 2
    assert "its prompts stay in the prefix cache: in use" in caplog.text


async def test_an_engine_that_answered_nothing_is_not_asked_to_flush() -> None:
    """It would not answer that either, and readiness would wait for it."""
    flushed: list[bool] = []

    async def flush() -> None:
        flushed.append(True)

    async def send(request: Request) -> None:
        raise RuntimeError("no")

    await run(PLAN, send, seconds=60, flush=flush)
    assert flushed == []
