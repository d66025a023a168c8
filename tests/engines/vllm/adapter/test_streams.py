"""What vLLM puts out reaches the client whole, in both ways of reading an AsyncLLM."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import check
from smg_grpc_servicer.vllm.outputs import _speculation
from tests.support.stub_async_llm import StubAsyncLLM
from tests.support.vllm_served import PROMPT, PlainAsyncLLM, served_vllm
from tests.support.wait import until

EITHER = pytest.mark.parametrize("kind", [StubAsyncLLM, PlainAsyncLLM])
STREAM = pytest.mark.parametrize("stream", [True, False])


@EITHER
@STREAM
@pytest.mark.parametrize("step", [1, 5])
async def test_every_token_arrives_once(kind: type[StubAsyncLLM], stream: bool, step: int) -> None:
    async with served_vllm(kind(tokens_per_step=step, cached=2)) as server:
        history = await server.generate(stream=stream, max_tokens=12)
        assert check(history) == []
        complete = history.complete()
        assert complete.output_ids == StubAsyncLLM.expected(PROMPT, 12)
        assert complete.finish_reason == "length"
        assert (complete.prompt_tokens, complete.cached_tokens) == (3, 2)


@STREAM
async def test_what_comes_before_vllm_has_handed_over_is_kept(stream: bool) -> None:
    """vLLM's output loop runs while `add_request` still waits."""
    llm = StubAsyncLLM()
    llm.faults.hold_add = asyncio.Event()
    async with served_vllm(llm) as server:
        reading = asyncio.ensure_future(server.generate(stream=stream, max_tokens=5))
        await until(lambda: llm.calls != [] and not llm.in_flight)  # all of it is made
        llm.faults.hold_add.set()
        history = await reading
        assert check(history) == []
        assert history.complete().output_ids == StubAsyncLLM.expected(PROMPT, 5)


async def test_a_whole_answer_is_given_up_while_it_grows() -> None:
    """One request held 7.7 GB until its end, and was then too large to be sent."""
    llm = StubAsyncLLM()
    async with served_vllm(llm) as server:
        history = await server.generate(stream=False, max_tokens=3000, logprobs=-1)
        assert history.code is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert len(llm.aborts) == 1, "the engine stops long before its end"


async def test_every_token_is_counted() -> None:
    """Whether it came with news or as bare ids."""
    async with served_vllm(StubAsyncLLM()) as server:
        kinds: list[dict[str, Any]] = [{}, {"stream": False}, {"logprobs": 1}]
        for at, options in enumerate(kinds):
            await server.generate(f"r-{at}", max_tokens=12, **options)
        (load,) = server.servicer.engine._loads.counts.values()
        assert load.generated == 36


def test_speculation_is_told_as_vllm_counts_it() -> None:
    """`histogram[j]` steps accepted j draft tokens. Source: `RequestSpecDecodeMetrics`."""
    metrics = SimpleNamespace(histogram=[5, 3, 2], num_draft_tokens=20)
    assert _speculation(SimpleNamespace(spec_decode_metrics=metrics)) == (7, 20)
    assert _speculation(SimpleNamespace()) == (None, None)


@EITHER
@STREAM
async def test_each_choice_is_its_own(kind: type[StubAsyncLLM], stream: bool) -> None:
    async with served_vllm(kind()) as server:
        history = await server.generate(stream=stream, max_tokens=6, n=3, temperature=1.0)
        assert check(history, choices=3) == []
        for index in range(3):
            expected = StubAsyncLLM.expected(PROMPT, 6, index)
            assert history.complete(index).output_ids == expected


@EITHER
@STREAM
@pytest.mark.parametrize("count", [0, 1, 5])
async def test_logprobs_are_exactly_what_was_asked_for(
    kind: type[StubAsyncLLM], stream: bool, count: int
) -> None:
    """V5: k rows, best first, in step with the ids, the token's own value beside them."""
    async with served_vllm(kind(tokens_per_step=2)) as server:
        history = await server.generate(
            stream=stream, max_tokens=6, logprobs=count, prompt_logprobs=count
        )
        assert check(history, logprobs=count) == []
        part = history.chunks[0] if stream else history.complete()
        rows = part.input_logprobs
        assert list(rows.token_ids) == PROMPT
        assert [entry.HasField("value") for entry in rows.token_logprobs] == [False, True, True]
        assert [len(row.values) for row in rows.top_logprobs] == [0, count, count]
        assert all(not chunk.HasField("input_logprobs") for chunk in history.chunks[1:])


async def test_all_logprobs_are_the_whole_vocabulary() -> None:
    """V5: -1 gave empty rows."""
    async with served_vllm(StubAsyncLLM()) as server:
        history = await server.generate(stream=True, max_tokens=2, logprobs=-1)
        rows = [row for chunk in history.chunks for row in chunk.output_logprobs.top_logprobs]
        assert [len(row.values) for row in rows] == [1000, 1000]


@EITHER
async def test_a_missing_value_keeps_its_place(kind: type[StubAsyncLLM]) -> None:
    """V5: lists got shorter than the ids."""
    llm = kind()
    llm.faults.drop_sampled = True
    async with served_vllm(llm) as server:
        history = await server.generate(stream=True, max_tokens=4, logprobs=1)
        assert check(history, logprobs=1) == []


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
async def test_no_number_sent_is_anything_but_one(value: float) -> None:
    """F6: minus infinity and NaN come from engines."""
    llm = StubAsyncLLM()
    llm.faults.logprob = value
    async with served_vllm(llm) as server:
        history = await server.generate(stream=False, max_tokens=2, logprobs=0)
        assert list(history.complete().output_logprobs.token_logprobs) == [-9999.0] * 2


@pytest.mark.parametrize(
    ("told", "reason", "sent", "matched"),
    [
        ("stop", None, "stop", None),
        ("stop", 99, "stop", None),
        ("stop", 11, "stop", 11),
        ("stop", "end", "stop", "end"),
        ("length", None, "length", None),
        ("abort", None, "abort", None),
        ("repetition", "repetition_detected", "stop", None),
    ],
)
async def test_how_it_ended(told: str, reason: Any, sent: str, matched: Any) -> None:
    """Only the request's own stops are told: the gateway shows them to its client."""
    llm = StubAsyncLLM()
    llm.faults.finish, llm.faults.stop_reason = told, reason
    async with served_vllm(llm) as server:
        history = await server.generate(max_tokens=2, stop_token_ids=[11], stop=["end"])
        complete = history.complete()
        assert complete.finish_reason == sent
        kind = complete.WhichOneof("matched_stop")
        assert (None if kind is None else getattr(complete, kind)) == matched


@EITHER
async def test_a_request_that_the_engine_failed_ends_internal(kind: type[StubAsyncLLM]) -> None:
    llm = kind()
    llm.faults.finish = "error"
    async with served_vllm(llm) as server:
        history = await server.generate(max_tokens=2)
        assert history.code is grpc.StatusCode.INTERNAL
        assert "finish reason `error`" in history.details


@EITHER
async def test_a_constraint_that_allows_no_token_is_its_senders(kind: type[StubAsyncLLM]) -> None:
    """vLLM says `error` for it, and INTERNAL would be held against this worker."""
    llm = kind()
    llm.faults.finish = "error"
    async with served_vllm(llm) as server:
        history = await server.generate(max_tokens=1, regex="[^\\s\\S]")
        assert history.code is grpc.StatusCode.INVALID_ARGUMENT
        assert history.details.startswith("sampling_params.regex: the engine failed this request")
        assert (await server.generate("plain", max_tokens=1)).code is grpc.StatusCode.INTERNAL
        late = await server.generate("late", max_tokens=2, regex="a+")
        assert late.code is grpc.StatusCode.INTERNAL


@EITHER
async def test_a_fault_tells_its_innermost_cause(kind: type[StubAsyncLLM]) -> None:
    """Weak point 1: EngineGenerateError has no words of its own."""
    llm = kind()
    llm.faults.fail_after, llm.faults.error = 2, KeyError("pixel_values")
    async with served_vllm(llm) as server:
        history = await server.generate(max_tokens=9)
        assert history.code is grpc.StatusCode.INTERNAL
        assert history.details == "KeyError: 'pixel_values'"
        assert history.streamed_ids() == StubAsyncLLM.expected(PROMPT, 2)
        llm.faults.fail_after = None
        assert check(await server.generate("next", max_tokens=3)) == []
