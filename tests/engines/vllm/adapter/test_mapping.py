"""What a request asks for is what vLLM gets, and what it leaves out vLLM decides."""

from __future__ import annotations

import threading
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from vllm.exceptions import QueueOverflowError, VLLMNotFoundError, VLLMValidationError
from vllm.sampling_params import RequestOutputKind, SamplingParams

from smg_grpc_servicer.core import servicer
from tests.support.stub_async_llm import StubAsyncLLM
from tests.support.vllm_config import vllm_config
from tests.support.vllm_served import PROMPT, ServedVllm, served_vllm

CODE = grpc.StatusCode


async def params(server: ServedVllm, **options: Any) -> Any:
    """The SamplingParams that vLLM got."""
    history = await server.generate("m", **{"max_tokens": 2, **options})
    assert history.code is CODE.OK, history.details
    return server.llm.calls[-1].params


CASES: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({"temperature": 0.5}, {"temperature": 0.5}),
    ({"temperature": 0.0}, {"temperature": 0.0}),
    ({"temperature": 0.001}, {"temperature": 0.0}),
    ({"temperature": 1.0, "top_p": 0.5}, {"top_p": 0.5}),
    ({"temperature": 1.0, "top_k": 4}, {"top_k": 4}),
    ({"temperature": 1.0, "min_p": 0.25}, {"min_p": 0.25}),
    ({"frequency_penalty": 0.5}, {"frequency_penalty": 0.5}),
    ({"presence_penalty": -0.5}, {"presence_penalty": -0.5}),
    ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
    ({"max_tokens": 7}, {"max_tokens": 7}),
    ({"min_tokens": 1}, {"min_tokens": 1}),
    ({"stop": ["a", "b"]}, {"stop": ["a", "b"], "detokenize": True}),
    ({"stop": ["a"], "include_stop_str_in_output": True}, {"include_stop_str_in_output": True}),
    ({"stop": ["a"], "skip_special_tokens": True}, {"skip_special_tokens": True}),
    (
        {"stop": ["a"], "spaces_between_special_tokens": True},
        {"spaces_between_special_tokens": True},
    ),
    ({"stop_token_ids": [4]}, {"stop_token_ids": [4], "detokenize": False}),
    ({"ignore_eos": True}, {"ignore_eos": True}),
    ({"temperature": 1.0, "n": 2}, {"n": 2}),
    ({"seed": 7}, {"seed": 7}),
    ({"seed": 0}, {"seed": 0}),
    ({"logit_bias": {4: 500.0, 5: -1.5}}, {"logit_bias": {4: 100.0, 5: -1.5}}),
    ({"logprobs": 3}, {"logprobs": 3, "prompt_logprobs": None, "flat_logprobs": True}),
    ({"prompt_logprobs": 0}, {"prompt_logprobs": 0, "logprobs": None}),
    ({"stream": True}, {"output_kind": RequestOutputKind.DELTA}),
    ({"stream": False}, {"output_kind": RequestOutputKind.FINAL_ONLY}),
    ({"stream": False, "logprobs": 2}, {"output_kind": RequestOutputKind.DELTA, "logprobs": 2}),
]
"""What a client sends, and what of it vLLM's SamplingParams get."""


@pytest.mark.parametrize(("sent", "got"), CASES)
async def test_each_field_reaches_vllm(sent: dict[str, Any], got: dict[str, Any]) -> None:
    """F9: a seed of 0 is a seed."""
    async with served_vllm(StubAsyncLLM()) as server:
        made = await params(server, **sent)
        assert {name: getattr(made, name) for name in got} == got


async def test_what_is_not_sent_is_vllms_own_default() -> None:
    async with served_vllm(StubAsyncLLM()) as server:
        request = server.request("m")
        request.ClearField("sampling_params")
        async for _ in server.stub.Generate(request):
            pass
        made, plain = server.llm.calls[0].params, SamplingParams(max_tokens=None)
        told = {"detokenize", "output_kind", "skip_clone"}
        assert {
            name
            for name in SamplingParams.__struct_fields__
            if getattr(made, name) != getattr(plain, name)
        } == told


async def test_the_models_defaults_fill_only_what_is_unset() -> None:
    defaults = {
        "temperature": 0.6, "top_p": 0.9, "top_k": 20, "max_tokens": 5, "repetition_penalty": 1.2,
    }  # fmt: skip
    config = vllm_config(model_config__get_diff_sampling_param=lambda: defaults)
    async with served_vllm(StubAsyncLLM(config)) as server:
        request = server.request("unset")
        request.ClearField("sampling_params")
        async for _ in server.stub.Generate(request):
            pass
        made = server.llm.calls[0].params
        assert (made.temperature, made.top_p, made.max_tokens) == (0.6, 0.9, 5)
        assert made.repetition_penalty == 1.2
        assert made.top_k == 0, "a top_k of 0 is off, as the gateway sends it"
        made = await params(server, temperature=1.0, top_p=1.0, max_tokens=2)
        assert (made.temperature, made.top_p, made.max_tokens) == (1.0, 1.0, 2)


CONSTRAINTS: list[tuple[dict[str, Any], dict[str, Any] | None]] = [
    ({"json_schema": "{}"}, {"json": "{}"}),
    ({"regex": "a+"}, {"regex": "a+"}),
    ({"grammar": "root ::= x"}, {"grammar": "root ::= x"}),
    ({"structural_tag": "{}"}, {"structural_tag": "{}"}),
    ({"json_object": True}, {"json_object": True}),
    ({"choice": ["a", "b"]}, {"choice": ["a", "b"]}),
    ({"json_schema": ""}, None),
    ({"json_object": False}, None),
]


@pytest.mark.parametrize(("sent", "got"), CONSTRAINTS)
async def test_a_constraint_reaches_vllm(sent: dict[str, Any], got: dict[str, Any] | None) -> None:
    """Weak point 23: an empty constraint asks for nothing."""
    async with served_vllm(StubAsyncLLM()) as server:
        made = (await params(server, **sent)).structured_outputs
        if got is None:
            assert made is None
        else:
            assert {name: getattr(made, name) for name in got} == got
            assert "type" not in server.llm.calls[-1].prompt, "vLLM renders it off the loop"
            assert server.llm.calls[-1].reasoning_ended is None


def test_no_field_of_the_proto_is_forgotten() -> None:
    """Each one is sent above, or has a test of its own."""
    sent = {name for case, _ in [*CASES, *CONSTRAINTS] for name in case}
    elsewhere = {"grammar_from_first_token", "truncate_prompt_tokens"}
    assert set(pb.SamplingParams.DESCRIPTOR.fields_by_name) - sent == elsewhere


async def test_a_constraint_from_the_first_token_ends_the_reasoning() -> None:
    """Weak point 5."""
    async with served_vllm(StubAsyncLLM()) as server:
        await params(server, regex="a", grammar_from_first_token=True)
        assert server.llm.calls[-1].reasoning_ended is True


async def test_the_prompt_goes_in_rendered_under_an_id_of_its_own() -> None:
    """O3: two requests under one id never meet inside vLLM."""
    async with served_vllm(StubAsyncLLM()) as server:
        for _ in range(2):
            await params(server)
        first, second = server.llm.calls
        assert first.prompt == {"type": "token", "prompt_token_ids": PROMPT}
        assert first.request_id.startswith("m-")
        assert first.request_id != second.request_id


async def test_ids_go_through_unchanged_where_the_operator_wants_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", "1")
    async with served_vllm(StubAsyncLLM()) as server:
        await params(server)
        assert server.llm.calls[0].request_id == "m"


async def test_a_text_is_tokenized_by_vllms_tokenizer() -> None:
    async with served_vllm(StubAsyncLLM()) as server:
        history = await server.generate(text="hi", max_tokens=2)
        assert server.llm.calls[0].prompt["prompt_token_ids"] == [3 + ord("h"), 3 + ord("i")]
        assert history.complete().prompt_tokens == 2


async def test_a_text_is_tokenized_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weak point 10: a long text held up everybody."""
    seen: list[str] = []

    class Tokenizer:
        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            assert add_special_tokens, "as vLLM does for a completion"
            seen.append(threading.current_thread().name)
            return [5, 6]

    llm = StubAsyncLLM()
    monkeypatch.setattr(llm, "get_tokenizer", Tokenizer)
    async with served_vllm(llm) as server:
        assert (await server.generate(text="hi", max_tokens=1)).code is CODE.OK
    assert [name.startswith("vllm-tokenize") for name in seen] == [True]


async def test_a_text_that_cannot_fit_is_not_tokenized(monkeypatch: pytest.MonkeyPatch) -> None:
    """One of 60 MB held up all others for a minute, and took 10 GB."""
    seen: list[str] = []

    class Tokenizer:
        max_chars_per_token = 10

        def encode(self, text: str, add_special_tokens: bool) -> list[int]:
            seen.append(text)
            return [5, 6] * 200

    llm = StubAsyncLLM()
    monkeypatch.setattr(llm, "get_tokenizer", Tokenizer)
    monkeypatch.setattr(servicer, "MAX_TRUNCATED", 20_000)
    context = 256
    async with served_vllm(llm) as server:
        refused = await server.generate(text="a" * (context * 10 + 1))
        assert refused.code is CODE.INVALID_ARGUMENT
        assert refused.details.startswith(f"text: {context * 10 + 1} characters are more than")
        over = await server.generate(text="a" * 20_001, truncate_prompt_tokens=5)
        assert over.code is CODE.INVALID_ARGUMENT
        assert seen == []
        cut = await server.generate(text="a" * 10_000, truncate_prompt_tokens=5, max_tokens=1)
        assert cut.code is CODE.OK
        assert llm.calls[0].prompt["prompt_token_ids"] == [6, 5, 6, 5, 6]


async def test_trace_headers_go_on_only_where_vllm_traces() -> None:
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    for endpoint, headers in ((None, None), ("http://x", {"traceparent": parent})):
        config = vllm_config(observability_config__otlp_traces_endpoint=endpoint)
        async with served_vllm(StubAsyncLLM(config)) as server:
            call = server.stub.Generate(server.request(), metadata=[("traceparent", parent)])
            async for _ in call:
                pass
            assert server.llm.calls[0].trace_headers == headers


@pytest.mark.parametrize(("rank", "local"), [(None, None), (4, 0), (5, 1)])
async def test_a_rank_is_told_as_vllm_counts_it(rank: int | None, local: int | None) -> None:
    """M2: 0 is not unset."""
    async with served_vllm(StubAsyncLLM(ranks=(4, 5))) as server:
        fields = {} if rank is None else {"data_parallel_rank": rank}
        await params(server, request=fields)
        assert server.llm.calls[0].rank == local


@pytest.mark.parametrize("rank", [-1, 0, 6, 2**31 - 1])
async def test_a_rank_that_is_not_here_is_refused(rank: int) -> None:
    """M2: an out-of-range rank was an IndexError, or another rank."""
    async with served_vllm(StubAsyncLLM(ranks=(4, 5))) as server:
        history = await server.generate(request={"data_parallel_rank": rank})
        assert history.code is CODE.INVALID_ARGUMENT
        assert history.details.startswith("data_parallel_rank: ")
        assert server.llm.calls == []


@pytest.mark.parametrize(
    ("options", "field"),
    [
        ({"logit_bias": {1000: 1.0}}, "sampling_params.logit_bias"),
        ({"stop_token_ids": [1000]}, "sampling_params.stop_token_ids"),
        ({"prompt": [1000]}, "tokenized.input_ids"),
        ({"prompt": []}, "tokenized.input_ids"),
        ({"prompt": [5] * 256}, "tokenized.input_ids"),
        ({"temperature": 3.0}, "sampling_params.temperature"),
        ({"presence_penalty": 3.0}, "sampling_params.presence_penalty"),
        ({"n": 2}, "sampling_params.n"),
        ({"logprobs": -2}, "sampling_params.logprobs"),
        ({"temperature": float("nan")}, "sampling_params.temperature"),
    ],
)
async def test_what_vllm_would_not_take_is_refused_by_name(
    options: dict[str, Any], field: str
) -> None:
    """D6 and §4: some of these kill an engine; none reaches it."""
    async with served_vllm(StubAsyncLLM()) as server:
        history = await server.generate(**options)
        assert history.code is CODE.INVALID_ARGUMENT
        assert history.details.startswith(field)
        assert server.llm.calls == []


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (VLLMValidationError("too many", parameter="logprobs", value=30), CODE.INVALID_ARGUMENT,
         "sampling_params.logprobs: too many"),
        (VLLMNotFoundError("no adapter x"), CODE.NOT_FOUND, "no adapter x"),
        (QueueOverflowError(), CODE.UNAVAILABLE, "The engine is currently busy"),
        (ValueError("a bug inside"), CODE.INTERNAL, "ValueError: a bug inside"),
        (KeyError("k"), CODE.INTERNAL, "KeyError: 'k'"),
    ],
)  # fmt: skip
async def test_vllms_real_exceptions_have_their_status(
    error: Exception, code: grpc.StatusCode, words: str
) -> None:
    """Weak points 2 to 4."""
    llm = StubAsyncLLM()
    llm.faults.refuse = error
    async with served_vllm(llm) as server:
        history = await server.generate()
        assert history.code is code
        assert history.details.startswith(words)
