"""The OpenAI API of the real router over the real engine: text, usage, ends, leaving."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.support.chats import (
    GREEDY,
    chat,
    choices,
    contents,
    counts,
    logprob_rows,
    parts,
    reasons,
    rendered,
    said,
)
from tests.support.client import Client
from tests.support.real_vllm import NAME
from tests.support.router import Router
from tests.support.vllm_cases import SCHEMA

TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "tell the weather",
        "parameters": json.loads(SCHEMA),
    },
}


async def test_it_is_listed_by_its_served_name(router: Router) -> None:
    assert await router.models() == [NAME]


@pytest.mark.parametrize("stream", [True, False])
async def test_chat(router: Router, client: Client, words: Any, stream: bool) -> None:
    """Text, reason and both counts are those of the engine."""
    ids = words.encode(rendered("hello world")).ids
    wanted = await client.ids(ids, max_tokens=30, ignore_eos=False)
    answer = await chat(router, "hello world", max_tokens=30, stream=stream)
    assert counts(answer, stream=stream) == (len(ids), len(wanted))
    assert contents(answer, stream=stream) == [said(words, wanted)]
    assert reasons(answer, stream=stream) == ["length"]
    assert answer.done == stream


@pytest.mark.parametrize("stream", [True, False])
async def test_completions(router: Router, client: Client, words: Any, stream: bool) -> None:
    ids = words.encode("one two three").ids
    wanted = await client.ids(ids, max_tokens=20, ignore_eos=False)
    body = {**GREEDY, "prompt": "one two three", "max_tokens": 20, "stream": stream}
    if stream:
        body["stream_options"] = {"include_usage": True}
    answer = await router.post("/v1/completions", **body)
    assert answer.status == 200, answer.text
    text = "".join(choice["text"] for choice in choices(answer, stream=stream))
    assert text.rstrip("\ufffd") == said(words, wanted)
    assert reasons(answer, stream=stream) == ["length"]
    usage = [part["usage"] for part in parts(answer, stream=stream) if part.get("usage")][-1]
    assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 20)


@pytest.mark.parametrize("stream", [True, False])
async def test_two_choices(router: Router, words: Any, stream: bool) -> None:
    """Two texts, one prompt, and the sum of both outputs."""
    options = {"temperature": 1.0, "seed": 4, "n": 2, "max_tokens": 12, "ignore_eos": True}
    answer = await chat(router, "hello", stream=stream, **options)
    first, second = contents(answer, stream=stream)
    assert first != second
    assert reasons(answer, stream=stream) == ["length"] * 2
    assert counts(answer, stream=stream) == (len(words.encode(rendered("hello")).ids), 24)


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs(router: Router, stream: bool) -> None:
    options = {"max_tokens": 5, "logprobs": True, "top_logprobs": 3, "ignore_eos": True}
    answer = await chat(router, "hello", stream=stream, **options)
    rows = logprob_rows(answer, stream=stream)
    assert len(rows) == 5
    for row in rows:
        assert row["logprob"] <= 0
        assert [top["logprob"] for top in row["top_logprobs"]] == sorted(
            (top["logprob"] for top in row["top_logprobs"]), reverse=True
        )
        assert len(row["top_logprobs"]) == 3
        assert row["top_logprobs"][0]["token"] == row["token"]


@pytest.mark.parametrize("stream", [True, False])
async def test_json_schema(router: Router, stream: bool) -> None:
    schema = {"name": "city", "schema": json.loads(SCHEMA), "strict": True}
    form = {"type": "json_schema", "json_schema": schema}
    answer = await chat(router, "city", max_tokens=120, response_format=form, stream=stream)
    (text,) = contents(answer, stream=stream)
    assert json.loads(text)["city"] in ("paris", "tokyo")
    assert reasons(answer, stream=stream) == ["stop"]


@pytest.mark.parametrize("stream", [True, False])
async def test_a_stop_string(router: Router, client: Client, words: Any, stream: bool) -> None:
    """A word of the answer ends it before that word."""
    plain = contents(await chat(router, "hello", max_tokens=40), stream=False)[0]
    word = next(word for word in plain.split()[1:] if word.isascii() and len(word) > 2)
    ids = words.encode(rendered("hello")).ids
    wanted = await client.ids(ids, max_tokens=40, ignore_eos=False, stop=[word])
    answer = await chat(router, "hello", max_tokens=40, stop=[word], stream=stream)
    assert contents(answer, stream=stream) == [plain[: plain.index(word)]]
    assert reasons(answer, stream=stream) == ["stop"]
    assert counts(answer, stream=stream) == (len(ids), len(wanted))


@pytest.mark.parametrize("stream", [True, False])
async def test_a_named_tool(router: Router, stream: bool) -> None:
    """The forced call is constrained, so even noise calls it with arguments that fit."""
    choice = {"type": "function", "function": {"name": "weather"}}
    answer = await chat(
        router, "weather", tools=[TOOL], tool_choice=choice, max_tokens=200, stream=stream
    )
    sides = [c["delta" if stream else "message"] for c in choices(answer, stream=stream)]
    calls = [call["function"] for side in sides for call in side.get("tool_calls") or ()]
    assert {call["name"] for call in calls if call.get("name")} == {"weather"}
    arguments = json.loads("".join(call.get("arguments") or "" for call in calls))
    assert arguments["city"] in ("paris", "tokyo")
    assert reasons(answer, stream=stream) == ["tool_calls"]


async def test_a_prompt_past_the_context_is_a_400(router: Router) -> None:
    answer = await router.post(
        "/v1/chat/completions", **GREEDY, messages=[{"role": "user", "content": "word " * 2000}]
    )
    assert answer.status == 400, answer.text
    assert "context" in answer.text


async def test_a_constraint_that_vllm_refuses_is_a_400(router: Router) -> None:
    answer = await router.post(
        "/v1/chat/completions",
        **GREEDY,
        messages=[{"role": "user", "content": "hi"}],
        regex="((",
    )
    assert answer.status == 400, answer.text


async def test_many_streams_are_all_exact(router: Router, client: Client, words: Any) -> None:
    """More than the engine runs at once; nothing is left at the worker."""
    texts = [f"number {at}" for at in range(48)]
    answers = await asyncio.gather(
        *(chat(router, text, max_tokens=15, stream=True) for text in texts)
    )
    for text, answer in zip(texts, answers, strict=True):
        ids = words.encode(rendered(text)).ids
        wanted = await client.ids(ids, max_tokens=15, ignore_eos=False)
        assert contents(answer, stream=True) == [said(words, wanted)]
        assert counts(answer, stream=True) == (len(ids), len(wanted))
    await client.until_active(0)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_client_that_leaves_frees_the_engine(
    router: Router, client: Client, stream: bool
) -> None:
    """C3: gone in the middle of a long answer, its slot is free within a second."""
    body = {**GREEDY, "prompt": "one", "max_tokens": 900, "ignore_eos": True}
    if stream:
        (await router.begin("/v1/completions", **body)).leave()
    else:
        await router.ask_and_leave("/v1/completions", lambda: client.until_active(1), **body)
    assert await client.until_active(0) < 1
    await client.ids([5, 6], max_tokens=1)
    (row,) = (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads
    assert row.num_running_reqs == 0


async def test_the_cache_is_flushed_and_a_busy_one_is_not(router: Router, client: Client) -> None:
    """`success=false` of a worker in use reaches the operator with its reason."""
    assert (await router.post("/flush_cache")).status == 200
    call, _ = await client.begin([5, 6, 7] * 50, max_tokens=800)
    busy = await router.post("/flush_cache")
    assert busy.status == 206
    ((refused,), flushed) = busy.json["failed"], busy.json["successful"]
    assert "in use" in refused["error"]
    assert flushed == []
    call.cancel()
    await client.until_active(0)
