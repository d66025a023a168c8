"""Carries a plan out: step by step, until it is done, there is no more to gain, or time is over.

Whatever comes of it, the engine serves afterwards, so nothing is raised but a cancellation, which
is how a server that is asked to stop ends it: every request that is out is cancelled with it.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from time import monotonic

from smg_grpc_servicer.core.progress import Advance, progress
from smg_grpc_servicer.warmup.plan import Plan, Request, Shot, Step, quicker, request

log = logging.getLogger(__name__)

MOST_BARREN = 3
"""Steps in a row of which nothing was answered; after them nothing will be."""
FLUSH_SECONDS = 5.0
"""What an engine is given to empty its prefix cache; its answer may take as long again."""

Send = Callable[[Request], Awaitable[None]]
"""Sends one request and returns when it has been answered; raises when it was not."""
Flush = Callable[[], Awaitable[object]]
"""Empties the prefix cache: what is in it, no client will ask for."""


@dataclass(slots=True)
class Outcome:
    """What came of it."""

    answered: int = 0
    failed: int = 0
    steps: int = 0
    ended: str = ""
    """Why before the end of the plan; empty when it was carried out."""


class _Enough(Exception):
    """The message says why."""


async def run(
    plan: Plan,
    send: Send,
    *,
    seconds: float,
    flush: Flush | None = None,
    clock: Callable[[], float] = monotonic,
) -> Outcome:
    """Warm up for at most `seconds`."""
    if not plan.steps:
        if plan.about:
            log.info("warm-up: %s", plan.about)
        return Outcome()
    began = clock()
    work = _Work(plan, send, clock)
    outcome = work.outcome
    with _shown(plan, seconds) as work.advance:
        try:
            await asyncio.wait_for(work.all(), seconds)
        except asyncio.TimeoutError:
            outcome.ended = f"its {seconds:g} s are over"
        except _Enough as enough:
            outcome.ended = str(enough)
    log.log(
        logging.INFO if outcome.answered else logging.WARNING,
        "warm-up: %d answered, %d failed, in %.1f s%s",
        outcome.answered,
        outcome.failed,
        clock() - began,
        f"; {outcome.ended}" if outcome.ended else "",
    )
    if flush is not None and plan.grid and outcome.answered:
        try:
            await asyncio.wait_for(flush(), 2 * FLUSH_SECONDS)
        except Exception as error:
            words = str(error) or type(error).__name__
            log.info("warm-up: its prompts stay in the prefix cache: %s", words)
    return outcome


def _shown(plan: Plan, seconds: float) -> AbstractContextManager[Advance]:
    if plan.grid:
        return progress(f"warm-up: {plan.about}, {seconds:g} s at most", plan.steps, "step")
    log.info("warm-up: %s", plan.about)
    return nullcontext(lambda steps: None)


class _Work:
    def __init__(self, plan: Plan, send: Send, clock: Callable[[], float]) -> None:
        self.outcome = Outcome()
        self.advance: Advance = lambda steps: None
        self._plan = plan
        self._send = send
        self._clock = clock
        self._number = 0
        self._barren = 0

    async def all(self) -> None:
        """:raises _Enough: the rest would be for nothing."""
        plan = self._plan
        await self._pass(plan.opening)
        first = await self._pass(plan.grid)
        second = await self._pass(plan.grid)
        if plan.rest:
            if not quicker(first, second):
                raise _Enough("a second round was no quicker than the first")
            await self._pass(plan.rest)

    async def _pass(self, steps: Iterable[Step]) -> list[float | None]:
        """What each step took; None where nothing was answered."""
        return [await self._step(step) for step in steps]

    async def _step(self, step: Step) -> float | None:
        outcome = self.outcome
        began = self._clock()
        errors = await asyncio.gather(*(self._shoot(shot) for shot in step.shots))
        took = self._clock() - began
        failures = [error for error in errors if error is not None]
        outcome.steps += 1
        outcome.failed += len(failures)
        outcome.answered += len(errors) - len(failures)
        self.advance(1)
        log.debug("warm-up: %s took %.0f ms", step.name, took * 1000)
        if failures:
            log.warning(
                "warm-up: %d of %d requests of the step %r failed: %s",
                len(failures),
                len(errors),
                step.name,
                str(failures[0]) or type(failures[0]).__name__,
            )
        if len(failures) < len(errors):
            self._barren = 0
            return took
        self._barren += 1
        if self._barren == MOST_BARREN:
            raise _Enough(f"of {MOST_BARREN} steps in a row nothing was answered")
        return None

    async def _shoot(self, shot: Shot) -> Exception | None:
        made = request(self._number, shot, self._plan.vocab)
        self._number += 1
        try:
            await self._send(made)
        except Exception as error:
            return error
        return None
