"""The OpenAI API of the real router over the demo model: text, usage, ends, refusals."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from smg_grpc_servicer.mlx import demo
from tests.gateway.conftest import NAME
from tests.support.mlx_client import Client, chat_prompt
from tests.support.router import Answer, Router
from tests.support.servers import Server

EXAMPLES = demo.examples()
GREEDY = {"model": NAME, "temperature": 0}


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


async def chat(router: Router, text: str, **options: Any) -> Answer:
    return await router.post(
        "/v1/chat/completions", messages=messages(text), **{**GREEDY, **options}
    )


async def stream_chat(router: Router, text: str, **options: Any) -> Answer:
    return await chat(router, text, stream=True, stream_options={"include_usage": True}, **options)


def deltas(answer: Answer) -> str:
    return "".join(
        choice["delta"].get("content") or ""
        for event in answer.events
        for choice in event.get("choices", ())
    )


def ends(answer: Answer) -> list[str]:
    return [
        choice["finish_reason"]
        for event in answer.events
        for choice in event.get("choices", ())
        if choice.get("finish_reason")
    ]


def usage(part: Any) -> tuple[int, int]:
    assert part["total_tokens"] == part["prompt_tokens"] + part["completion_tokens"]
    return part["prompt_tokens"], part["completion_tokens"]


def counts(words: Any, question: str, answer: str) -> tuple[int, int]:
    """Prompt ids, and output ids with the end of text the model wrote."""
    return len(words.encode(chat_prompt(question)).ids), len(words.encode(answer).ids) + 1


async def test_the_model_is_listed_by_its_served_name(router: Router) -> None:
    assert await router.models() == [NAME]


async def test_the_tokenizer_comes_from_the_worker(router: Router, worker: Server) -> None:
    """I1: no file of that name is at the router, so GetTokenizer must have served it."""
    fetched = await router.printed(r"Fetching tokenizer from worker[^\n]*")
    assert worker.address in fetched[0]


@pytest.mark.parametrize("example", EXAMPLES[:6], ids=lambda e: e.question)
async def test_chat_answers_exactly(router: Router, words: Any, example: demo.Example) -> None:
    """Text, finish reason and both counts, streamed and not."""
    want = counts(words, example.question, example.answer)
    whole = await chat(router, example.question, max_tokens=100)
    assert whole.status == 200, whole.text
    (choice,) = whole.json["choices"]
    assert choice["message"]["content"] == example.answer
    assert choice["finish_reason"] == "stop"
    assert usage(whole.json["usage"]) == want

    streamed = await stream_chat(router, example.question, max_tokens=100)
    assert deltas(streamed) == example.answer
    assert ends(streamed) == ["stop"]
    assert streamed.done
    assert usage(streamed.events[-1]["usage"]) == want


async def test_completions_answer_exactly(router: Router, words: Any) -> None:
    """The rendered prompt by hand, streamed and not, to the end and to the limit."""
    example = EXAMPLES[0]
    body = {**GREEDY, "prompt": chat_prompt(example.question)}
    whole = await router.post("/v1/completions", **body, max_tokens=100)
    (choice,) = whole.json["choices"]
    assert (choice["text"], choice["finish_reason"]) == (example.answer, "stop")
    assert usage(whole.json["usage"]) == counts(words, example.question, example.answer)

    short = await router.post("/v1/completions", **body, max_tokens=4)
    (choice,) = short.json["choices"]
    assert choice["finish_reason"] == "length"
    assert example.answer.startswith(choice["text"])
    assert short.json["usage"]["completion_tokens"] == 4

    options = {"include_usage": True}
    streamed = await router.post(
        "/v1/completions", **body, max_tokens=100, stream=True, stream_options=options
    )
    texts = [c["text"] for event in streamed.events for c in event["choices"]]
    assert "".join(texts) == example.answer
    assert ends(streamed) == ["stop"]
    assert streamed.done
    reported = [event["usage"] for event in streamed.events if event.get("usage")]
    assert usage(reported[-1]) == counts(words, example.question, example.answer)


@pytest.mark.parametrize("stream", [True, False])
async def test_the_limit_ends_with_length(router: Router, stream: bool) -> None:
    ask = stream_chat if stream else chat
    answer = await ask(router, EXAMPLES[0].question, max_tokens=3)
    if stream:
        assert ends(answer) == ["length"]
        assert answer.events[-1]["usage"]["completion_tokens"] == 3
    else:
        assert answer.json["choices"][0]["finish_reason"] == "length"
        assert answer.json["usage"]["completion_tokens"] == 3


async def test_a_seed_gives_the_same_text(router: Router) -> None:
    """P4, through HTTP: hot enough that unseeded answers differ."""
    hot = {"temperature": 1.8, "seed": 12, "max_tokens": 24}
    texts = [
        (await chat(router, "Hi", **hot)).json["choices"][0]["message"]["content"] for _ in range(3)
    ]
    assert len(set(texts)) == 1
    free = {"temperature": 1.8, "max_tokens": 24}
    others = [
        (await chat(router, "Hi", **free)).json["choices"][0]["message"]["content"]
        for _ in range(4)
    ]
    assert len(set(others)) > 1


async def test_logprobs_reach_the_client(router: Router) -> None:
    answer = await chat(router, EXAMPLES[0].question, max_tokens=5, logprobs=True, top_logprobs=3)
    rows = answer.json["choices"][0]["logprobs"]["content"]
    assert len(rows) == 5
    for row in rows:
        assert row["logprob"] <= 0
        assert len(row["top_logprobs"]) == 3
        assert row["top_logprobs"][0]["token"] == row["token"]


@pytest.mark.parametrize("bias", [{"5000": 5}, {"50257": -100}, {"1024": 1}])
async def test_a_bias_outside_the_vocabulary_is_a_400(
    router: Router, worker: Server, bias: dict[str, int]
) -> None:
    """P1: a plain HTTP request used to kill the worker."""
    for stream in (False, True):
        answer = await chat(router, "Hi", logit_bias=bias, max_tokens=5, stream=stream)
        assert answer.status == 400, answer.text
        assert "logit_bias" in answer.text
    assert worker.running
    assert (await chat(router, "Hi", logit_bias={"1023": -1}, max_tokens=5)).status == 200


async def test_an_empty_prompt_is_a_400(router: Router) -> None:
    """P2: it used to freeze everybody."""
    for stream in (False, True):
        body = {**GREEDY, "prompt": "", "max_tokens": 5, "stream": stream}
        answer = await router.post("/v1/completions", **body)
        assert answer.status == 400, answer.text
    assert (await chat(router, "Hi", max_tokens=2)).status == 200


async def test_a_huge_top_k_is_no_fault(router: Router) -> None:
    """P3: top_k past the vocabulary is off."""
    for top_k in (1024, 100_000):
        answer = await chat(router, "Hi", top_k=top_k, temperature=0.5, max_tokens=4)
        assert answer.status == 200, answer.text


async def test_a_prompt_past_the_context_is_a_400(router: Router) -> None:
    """P11: refused by the length the worker has advertised."""
    answer = await chat(router, "word " * 4000, max_tokens=4)
    assert answer.status == 400, answer.text
    assert "context" in answer.text


async def test_more_tokens_than_fit_are_clamped(router: Router) -> None:
    answer = await chat(router, EXAMPLES[0].question, max_tokens=100_000)
    assert answer.status == 200
    assert answer.json["choices"][0]["message"]["content"] == EXAMPLES[0].answer


async def test_many_streams_at_once_are_all_exact(
    router: Router, worker_client: Client, words: Any
) -> None:
    """32 chats together: every text and every count its own; nothing is left at the worker."""
    asked = [EXAMPLES[i % len(EXAMPLES)] for i in range(32)]
    answers = await asyncio.gather(*(stream_chat(router, e.question) for e in asked))
    for example, answer in zip(asked, answers, strict=True):
        assert answer.status == 200
        assert deltas(answer) == example.answer
        assert ends(answer) == ["stop"]
        want = counts(words, example.question, example.answer)
        assert usage(answer.events[-1]["usage"]) == want
    await worker_client.until_active(0)


async def test_a_client_that_leaves_stops_its_request(
    router: Router, worker_client: Client
) -> None:
    """C3: gone in the middle of a long stream, the worker is free again in a moment."""
    stream = await router.begin(
        "/v1/completions", **GREEDY, prompt="a b c", max_tokens=2000, ignore_eos=True
    )
    assert await worker_client.active() == 1
    stream.leave()
    assert await worker_client.until_active(0) < 3
