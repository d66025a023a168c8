"""A planned warm-up through the Rust server's own port, over the stub core."""

from __future__ import annotations

import os
from pathlib import Path
from signal import SIGKILL, SIGTERM
from time import monotonic

import grpc
import pytest

from tests.support.dial import NOT_SERVING, SERVING, check
from tests.support.rust_served import VLLM, Served, Wheel, served, wheel

PROMPT = [5, 6, 7]
MUTE = ("--mute",)


async def warming(server: Served) -> None:
    await server.saying("warm-up: fast, ")
    assert await check(server.client.channel, VLLM.service) == NOT_SERVING


async def test_it_is_done_before_anybody_is_served(binding: Wheel, folder: Path) -> None:
    """Each request under a number of its own is let in by the server, which is not ready."""
    async with served(binding, folder, "--planned", "60", core=("--pace", "0.001")) as server:
        await warming(server)
        answered = await server.saying(r"warm-up: (\d+) answered, 0 failed")
        assert int(answered) > 32
        await server.saying("serving on grpc://")
        assert await check(server.client.channel, VLLM.service) == SERVING
        assert "stay in the prefix cache" not in server.child.output
        # The numbers are anybody's from here on.
        assert len(await server.client.ids(PROMPT, request_id="smg-warmup-0", max_tokens=3)) == 3


async def test_others_are_turned_away_meanwhile(folder: Path) -> None:
    """By the wheel that tells readiness from serving; smg 1.13.0 lets them in."""
    async with served(wheel("newer"), folder, "--planned", "60", core=MUTE) as server:
        await warming(server)
        history = await server.client.generate(PROMPT, max_tokens=3)
        assert history.code is grpc.StatusCode.UNAVAILABLE
        assert "warming up" in history.details


async def test_an_engine_that_never_answers_costs_the_budget(binding: Wheel, folder: Path) -> None:
    """Then it serves, whatever came of it."""
    async with served(binding, folder, "--planned", "0.5", core=MUTE) as server:
        await server.saying("warm-up: 0 answered, 0 failed, .* its 0.5 s are over")
        await server.saying("serving on grpc://")
        assert await check(server.client.channel, VLLM.service) == SERVING


@pytest.mark.parametrize("engine_dies", [False, True], ids=["SIGTERM", "engine killed"])
async def test_nothing_waits_for_it(binding: Wheel, folder: Path, engine_dies: bool) -> None:
    """A stop ends it with 0 and a lost engine with 1, at once and not after its budget.

    Its own connection is nobody's request: no drain waits for it.
    """
    async with served(binding, folder, "--planned", "600", core=MUTE) as server:
        await warming(server)
        engine = server.engine
        assert engine is not None
        await server.client.channel.close()
        start = monotonic()
        if engine_dies:
            os.kill(engine, SIGKILL)
        else:
            server.child.signal(SIGTERM)
        assert await server.exit_code(20) == int(engine_dies)
        assert monotonic() - start < 15
        if not engine_dies:
            assert "serving on grpc://" not in server.child.output
            assert "the drain is over" not in server.child.output
        assert server.files == []
