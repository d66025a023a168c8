"""The real router in front of the Rust path."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.chats import chat, contents, counts, logprob_rows, reasons, rendered, said
from tests.support.client import Client
from tests.support.real_vllm import NAME
from tests.support.router import Router


@pytest.mark.parametrize("stream", [True, False])
async def test_chat(router: Router, client: Client, words: Any, stream: bool) -> None:
    """Text, reason and both counts are those of the engine."""
    ids = words.encode(rendered("hello world")).ids
    wanted = await client.ids(ids, temperature=0.0, max_tokens=30, ignore_eos=False)
    answer = await chat(router, "hello world", max_tokens=30, stream=stream)
    assert counts(answer, stream=stream) == (len(ids), len(wanted))
    assert contents(answer, stream=stream) == [said(words, wanted)]
    assert reasons(answer, stream=stream) == ["length"]
    assert answer.done == stream


async def test_it_is_listed_by_its_served_name(router: Router) -> None:
    assert await router.models() == [NAME]


async def test_logprobs_and_choices(router: Router) -> None:
    options: dict[str, Any] = {
        "max_tokens": 5,
        "logprobs": True,
        "top_logprobs": 3,
        "ignore_eos": True,
    }
    answer = await chat(router, "hello", **options)
    rows = logprob_rows(answer, stream=False)
    assert [len(row["top_logprobs"]) for row in rows] == [3] * 5
    options = {"temperature": 1.0, "seed": 4, "n": 2, "max_tokens": 8, "ignore_eos": True}
    first, second = contents(await chat(router, "hello", **options), stream=False)
    assert first != second
