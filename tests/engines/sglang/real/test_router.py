"""The OpenAI API of the real router over the real engine: text, usage, ends, leaving."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.support.chats import (
    GREEDY,
    chat,
    contents,
    counts,
    logprob_rows,
    rendered,
    said,
)
from tests.support.client import Client
from tests.support.real_sglang import NAME
from tests.support.router import Router


async def test_it_is_listed_by_its_served_name(router: Router) -> None:
    assert await router.models() == [NAME]


@pytest.mark.parametrize("stream", [True, False])
async def test_chat(router: Router, client: Client, words: Any, stream: bool) -> None:
    """Text, reason and both counts are those of the engine."""
    ids = words.encode(rendered("hello world")).ids
    wanted = await client.ids(ids, max_tokens=30, ignore_eos=False, skip_special_tokens=True)
    answer = await chat(router, "hello world", max_tokens=30, stream=stream)
    assert counts(answer, stream=stream) == (len(ids), len(wanted))
    assert contents(answer, stream=stream) == [said(words, wanted)]
    assert answer.done == stream


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs(router: Router, stream: bool) -> None:
    """A token that only makes half a character has a row or none, as it shared its message."""
    options = {"max_tokens": 5, "logprobs": True, "top_logprobs": 3}
    answer = await chat(router, "hello world", stream=stream, **options)
    rows = logprob_rows(answer, stream=stream)
    assert rows
    tokens = "".join(row["token"] for row in rows).rstrip("\ufffd")
    assert [tokens] == contents(answer, stream=stream)
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
        assert contents(answer, stream=True) == [said(words, wanted)]
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
