"""What the server answers is what SGLang's own Engine answers, id by id."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import History, check
from tests.support.client import Client
from tests.support.sglang_cases import CONSTRAINED, GREEDY, LOGPROBS, SCHEMA, SHAPED, Case

CLOSE = 1e-4


def same(history: History, answer: Any, case: Case) -> None:
    assert history.code is grpc.StatusCode.OK, history.details
    assert check(history, logprobs=case.logprobs) == []
    complete = history.complete()
    assert list(complete.output_ids) == answer["ids"]
    assert complete.finish_reason == answer["finish"]
    assert complete.prompt_tokens == len(case.prompt)


@pytest.mark.parametrize("stream", [True, False])
async def test_greedy_ids(client: Client, offline: Any, stream: bool) -> None:
    """All at once: neither the neighbours nor the way they are sent changes an id."""
    requests = [client.request(c.prompt, stream=stream, **c.sampling) for c in GREEDY.values()]
    histories = await client.together(requests)
    for (name, case), history in zip(GREEDY.items(), histories, strict=True):
        same(history, offline["llama"][name], case)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", SHAPED)
async def test_shaped(client: Client, offline: Any, name: str, stream: bool) -> None:
    """Penalties, biases and bounds reach the engine."""
    case = SHAPED[name]
    history = await client.generate(case.prompt, stream=stream, **case.sampling)
    same(history, offline["llama"][name], case)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", CONSTRAINED)
async def test_constraints(
    client: Client, offline: Any, words: Any, name: str, stream: bool
) -> None:
    case = CONSTRAINED[name]
    history = await client.generate(case.prompt, stream=stream, **case.sampling)
    same(history, offline["llama"][name], case)
    if name == "json_schema":
        text = words.decode(list(history.complete().output_ids))
        assert set(json.loads(text)) == set(json.loads(SCHEMA)["required"])


@pytest.mark.parametrize("name", LOGPROBS)
async def test_logprobs(client: Client, offline: Any, name: str) -> None:
    """Of the output and of the prompt, whose first token has none; streamed rows are the same."""
    case, answer = LOGPROBS[name], offline["llama"][name]
    options = {"logprobs": case.logprobs, "prompt_logprobs": case.logprobs, **case.sampling}
    whole = await client.generate(case.prompt, stream=False, **options)
    same(whole, answer, case)
    rows = whole.complete().output_logprobs
    wanted = [value for value, _, _ in answer["output_token_logprobs"]]
    assert list(rows.token_logprobs) == pytest.approx(wanted, abs=CLOSE)
    for row, best in zip(rows.top_logprobs, answer.get("output_top_logprobs", ()), strict=True):
        assert list(row.token_ids) == [token for _, token, _ in best]
    prompt = whole.complete().input_logprobs
    assert list(prompt.token_ids) == case.prompt
    assert not prompt.token_logprobs[0].HasField("value")
    wanted = [value for value, _, _ in answer["input_token_logprobs"][1:]]
    assert [r.value for r in prompt.token_logprobs[1:]] == pytest.approx(wanted, abs=CLOSE)
    streamed = await client.generate(case.prompt, **options)
    same(streamed, answer, case)
    told = [value for chunk in streamed.chunks for value in chunk.output_logprobs.token_logprobs]
    assert told == pytest.approx(list(rows.token_logprobs), abs=CLOSE)
