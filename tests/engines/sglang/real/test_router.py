"""The OpenAI API of the real router over the real engine: text, usage, ends, leaving."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.client import Client
from tests.support.real_sglang import NAME
from tests.support.router import Answer, Router

GREEDY = {"model": NAME, "temperature": 0}


def rendered(text: str) -> str:
    """One user message as the model's chat template has it."""
    return f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"


async def chat(router: Router, text: str, **options: Any) -> Answer:
    if options.get("stream"):
        options["stream_options"] = {"include_usage": True}
    answer = await router.post(
        "/v1/chat/completions",
        messages=[{"role": "user", "content": text}],
        **{**GREEDY, **options},
    )
    assert answer.status == 200, answer.text
    return answer


def counts(answer: Answer, *, stream: bool) -> tuple[int, int]:
    usage = answer.events[-1]["usage"] if stream else answer.json["usage"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def contents(answer: Answer, *, stream: bool) -> str:
    if not stream:
        return (answer.json["choices"][0]["message"]["content"] or "").rstrip("\ufffd")
    parts = (choice for event in answer.events for choice in event.get("choices", ()))
    return "".join(part["delta"].get("content") or "" for part in parts)


def said(words: Any, ids: list[int]) -> str:
    """The text of an output; a character that was cut in two is not streamed."""
    text: str = words.decode(ids)
    return text.rstrip("\ufffd")


async def test_it_is_listed_by_its_served_name(router: Router) -> None:
    assert await router.models() == [NAME]


@pytest.mark.parametrize("stream", [True, False])
async def test_chat(router: Router, client: Client, words: Any, stream: bool) -> None:
    """Text, reason and both counts are those of the engine."""
    ids = words.encode(rendered("hello world")).ids
    wanted = await client.ids(ids, max_tokens=30, ignore_eos=False, skip_special_tokens=True)
    answer = await chat(router, "hello world", max_tokens=30, stream=stream)
    assert counts(answer, stream=stream) == (len(ids), len(wanted))
    assert contents(answer, stream=stream) == said(words, wanted)
    assert answer.done == stream


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs(router: Router, stream: bool) -> None:
    """A token that only makes half a character has a row or none, as it shared its message."""
    options = {"max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    answer = await chat(router, "hello world", stream=stream, **options)
    parts = answer.events if stream else [answer.json]
    found = [c["logprobs"] for part in parts for c in part.get("choices", ()) if c.get("logprobs")]
    rows = [row for each in found for row in each["content"]]
    assert rows
    tokens = "".join(row["token"] for row in rows).rstrip("\ufffd")
    assert tokens == contents(answer, stream=stream)
    for row in rows:
        assert row["logprob"] <= 0
        assert len(row["top_logprobs"]) == 3
        assert row["top_logprobs"][0]["token"] == row["token"]


async def test_a_prompt_past_the_context_is_a_400(router: Router) -> None:
    answer = await router.post(
        "/v1/chat/completions", **GREEDY, messages=[{"role": "user", "content": "word " * 2000}]
    )
    assert answer.status == 400, answer.text


async def test_many_streams_are_all_exact(router: Router, client: Client, words: Any) -> None:
    """More than the engine runs at once; nothing is left at the worker."""
    texts = [f"number {at}" for at in range(40)]
    answers = await asyncio.gather(
        *(chat(router, text, max_tokens=12, stream=True) for text in texts)
    )
    for text, answer in zip(texts, answers, strict=True):
        ids = words.encode(rendered(text)).ids
        wanted = await client.ids(ids, max_tokens=12, ignore_eos=False)
        assert contents(answer, stream=True) == said(words, wanted)
        assert counts(answer, stream=True) == (len(ids), len(wanted))
    await client.until_active(0)


async def test_a_client_that_leaves_frees_the_engine(router: Router, client: Client) -> None:
    """Gone in the middle of a long stream, its slot is free within a second."""
    stream = await router.begin(
        "/v1/completions", **GREEDY, prompt="one", max_tokens=900, ignore_eos=True
    )
    assert await client.active() == 1
    stream.leave()
    assert await client.until_active(0) < 1
