"""vLLM's control calls: the prefix cache on every rank, and the profiler.

vLLM's own `reset_prefix_cache` told only the first rank's answer up to 0.31, so each rank is
asked for itself where there are several.
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

from smg_grpc_servicer.core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument
from smg_grpc_servicer.core.types import ProfileSpec
from smg_grpc_servicer.vllm.probe import probe

FLUSH_SECONDS = 30.0
"""How long one attempt may take."""
RETRY_SECONDS = 0.1
"""Between attempts. vLLM tells nobody when the last block was freed, so it is asked again."""

_RESET = "reset_prefix_cache"


async def flush_cache(async_llm: Any, ranks: tuple[int, ...], timeout: float | None) -> str:
    """:raises FailedPrecondition: blocks are in use and no time was given.
    :raises DeadlineExceeded: they still were when the time was over.
    """
    deadline = monotonic() + (FLUSH_SECONDS if timeout is None else timeout)
    while True:
        busy = await _attempt(async_llm, ranks, max(deadline - monotonic(), RETRY_SECONDS))
        if not busy:
            return "the prefix cache is empty"
        words = f"the prefix cache of {_named(busy)} is in use by running requests"
        if timeout is None:
            raise FailedPrecondition(f"{words}; set timeout_s to wait for them")
        if monotonic() + RETRY_SECONDS >= deadline:
            raise DeadlineExceeded(f"{words} after {timeout:g} s")
        await asyncio.sleep(RETRY_SECONDS)


async def _attempt(async_llm: Any, ranks: tuple[int, ...], seconds: float) -> list[int]:
    """The ranks that refused."""
    try:
        answers = await asyncio.wait_for(_reset(async_llm), seconds)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(f"the engine did not answer {_RESET} in time") from None
    if len(answers) != len(ranks):
        return [] if all(answers) else list(ranks)
    return [rank for rank, done in zip(ranks, answers, strict=True) if not done]


async def _reset(async_llm: Any) -> list[bool]:
    core = getattr(async_llm, "engine_core", None)
    engines = getattr(core, "core_engines", ())
    if len(engines) > 1:
        every = getattr(core, "call_utility_all_async", None)  # 0.32
        if every is not None:
            return [bool(answer) for answer in await every(_RESET, False, False)]
        one = getattr(core, "_call_utility_async", None)
        if one is not None:
            calls = [one(_RESET, False, False, engine=engine) for engine in engines]
            return [bool(answer) for answer in await asyncio.gather(*calls)]
    return [bool(await async_llm.reset_prefix_cache())]


def _named(ranks: list[int]) -> str:
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"


async def start_profile(async_llm: Any, spec: ProfileSpec) -> str:
    """:raises InvalidArgument: an option; vLLM's profiler is configured when it is launched.
    :raises FailedPrecondition: it was launched without.
    """
    asked = [
        name
        for name, given in (
            ("output_dir", spec.output_dir is not None),
            ("start_step", spec.start_step is not None),
            ("num_steps", spec.num_steps is not None),
            ("activities", bool(spec.activities)),
            ("profile_by_stage", spec.profile_by_stage),
            ("with_stack", spec.with_stack is not None),
            ("record_shapes", spec.record_shapes is not None),
        )
        if given
    ]
    if asked:
        raise InvalidArgument(
            ", ".join(asked), "vLLM's profiler is configured at its launch (--profiler-config)"
        )
    _require_profiler(async_llm)
    await async_llm.start_profile()
    return "profiling"


async def stop_profile(async_llm: Any) -> str:
    _require_profiler(async_llm)
    await async_llm.stop_profile()
    return "the profile is written"


def _require_profiler(async_llm: Any) -> None:
    if probe(async_llm.vllm_config, "profiler_config.profiler") is None:
        raise FailedPrecondition(
            "no profiler is configured: start vLLM with --profiler-config.profiler=torch and "
            "--profiler-config.torch_profiler_dir=DIR"
        )
