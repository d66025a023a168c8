"""Chats with a real engine's tiny model through the router: asked for, and what was answered."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from tests.support.real import NAME
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


def parts(answer: Answer, *, stream: bool) -> list[Any]:
    return answer.events if stream else [answer.json]


def choices(answer: Answer, *, stream: bool) -> list[Any]:
    """Of a stream, those of all its events."""
    return [choice for part in parts(answer, stream=stream) for choice in part.get("choices", ())]


def counts(answer: Answer, *, stream: bool) -> tuple[int, int]:
    """Tokens of the prompt and of the output."""
    usage = parts(answer, stream=stream)[-1]["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
    return usage["prompt_tokens"], usage["completion_tokens"]


def contents(answer: Answer, *, stream: bool) -> list[str]:
    """The text of each choice."""
    texts: defaultdict[int, str] = defaultdict(str)
    for choice in choices(answer, stream=stream):
        texts[choice["index"]] += choice["delta" if stream else "message"].get("content") or ""
    found = [text for _, text in sorted(texts.items())]
    return found if stream else [text.rstrip("\ufffd") for text in found]


def reasons(answer: Answer, *, stream: bool) -> list[str]:
    found = [choice.get("finish_reason") for choice in choices(answer, stream=stream)]
    return [reason for reason in found if reason]


def logprob_rows(answer: Answer, *, stream: bool) -> list[Any]:
    found = [choice.get("logprobs") for choice in choices(answer, stream=stream)]
    return [row for each in found if each for row in each["content"]]


def said(words: Any, ids: list[int]) -> str:
    """The text of an output; a character that was cut in two is not streamed."""
    text: str = words.decode(ids)
    return text.rstrip("\ufffd")
