"""Flushing asks every rank and waits as long as it was told; profiling refuses what it cannot."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from smg_grpc_servicer.core.types import ProfileSpec
from smg_grpc_servicer.vllm import control
from tests.support.vllm_config import vllm_config

RANKS = (4, 5)


class Llm:
    """One or two engines whose prefix cache is busy for a while."""

    def __init__(self, *answers: list[bool], shape: str = "one") -> None:
        self.answers = list(answers)
        self.vllm_config = vllm_config()
        self.profiles: list[str] = []
        engines = [b"\0\0", b"\1\0"] if shape != "one" else [b"\0\0"]
        self.engine_core: Any = SimpleNamespace(core_engines=engines)
        if shape == "all":
            self.engine_core.call_utility_all_async = self._all
        elif shape == "each":
            self.engine_core._call_utility_async = self._each

    def _next(self) -> list[bool]:
        return self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]

    async def _all(self, method: str, *_args: bool) -> list[bool]:
        return self._next()

    async def _each(self, method: str, *_args: bool, engine: bytes) -> bool:
        return self.answers[0][engine[0]]

    async def reset_prefix_cache(self) -> bool:
        return self._next()[0]

    async def start_profile(self) -> None:
        self.profiles.append("start")

    async def stop_profile(self) -> None:
        self.profiles.append("stop")


@pytest.mark.parametrize("shape", ["all", "each"])
async def test_every_rank_has_to_agree_and_the_one_that_does_not_is_named(shape: str) -> None:
    """Up to vLLM 0.31 its own call tells the first rank's answer only."""
    with pytest.raises(FailedPrecondition, match=r"rank 5 is in use.*timeout_s"):
        await control.flush_cache(Llm([True, False], shape=shape), RANKS, None)
    assert await control.flush_cache(Llm([True, True], shape=shape), RANKS, None)


async def test_it_is_tried_again_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "RETRY_SECONDS", 0.001)
    llm = Llm([False], [False], [True])
    assert await control.flush_cache(llm, (0,), 5.0) == "the prefix cache is empty"
    with pytest.raises(DeadlineExceeded, match=r"rank 0 is in use .* after 0.01 s"):
        await control.flush_cache(Llm([False]), (0,), 0.01)


async def test_an_engine_that_does_not_answer_ends_the_call() -> None:
    llm = Llm([True])

    async def never() -> bool:
        await asyncio.get_running_loop().create_future()
        raise AssertionError

    llm.reset_prefix_cache = never  # type: ignore[method-assign]
    with pytest.raises(DeadlineExceeded, match="did not answer"):
        await control.flush_cache(llm, (0,), 0.01)


async def test_a_profile_needs_a_profiler_and_takes_no_options() -> None:
    llm = Llm([True])
    with pytest.raises(FailedPrecondition, match="--profiler-config"):
        await control.start_profile(llm, ProfileSpec())
    with pytest.raises(FailedPrecondition, match="--profiler-config"):
        await control.stop_profile(llm)
    llm.vllm_config.profiler_config.profiler = "torch"
    with pytest.raises(InvalidArgument, match=r"^output_dir, num_steps: "):
        await control.start_profile(llm, ProfileSpec(output_dir="/x", num_steps=3))
    assert await control.start_profile(llm, ProfileSpec())
    assert await control.stop_profile(llm)
    assert llm.profiles == ["start", "stop"]
