"""The server's answers are those of vLLM's own `LLM.generate`: ids, ends, log-probabilities."""

from __future__ import annotations

import json
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import History, check
from tests.support.client import Client
from tests.support.vllm_cases import (
    CONSTRAINED,
    GREEDY,
    LOGPROBS,
    PROMPT_LOGPROBS,
    SAMPLED,
    SCHEMA,
    VOCAB,
    Case,
)

CLOSE = 1e-4


def same(history: History, answer: Any, case: Case) -> None:
    """Ids, counts and the reason of every choice."""
    asked = case.sampling.get("logprobs")
    choices = case.sampling.get("n", 1)
    rows = VOCAB if asked == -1 else asked
    assert check(history, choices, logprobs=rows) == []
    for index, choice in enumerate(answer["choices"]):
        complete = history.complete(index)
        assert list(complete.output_ids) == choice["ids"]
        assert complete.finish_reason == choice["finish"]
        assert complete.prompt_tokens == len(case.prompt)


def top(row: dict[str, list[float]], count: int) -> list[tuple[int, float]]:
    """A row's best, by vLLM's ranks."""
    best = sorted((rank, int(token), value) for token, (value, rank) in row.items())
    return [(token, value) for _, token, value in best][:count]


def same_row(rows: Any, at: int, token: int, row: dict[str, list[float]], count: int) -> None:
    assert rows.token_ids[at] == token
    assert rows.token_logprobs[at] == pytest.approx(row[str(token)][0], abs=CLOSE)
    if count:
        ids = list(rows.top_logprobs[at].token_ids)
        values = list(rows.top_logprobs[at].values)
        assert dict(zip(ids, values, strict=True)) == pytest.approx(
            dict(top(row, count)), abs=CLOSE
        )
        assert values == sorted(values, reverse=True)


def same_logprobs(history: History, answer: Any, count: int) -> None:
    """Of a request that was not streamed."""
    rows = history.complete().output_logprobs
    (choice,) = answer["choices"]
    for at, (token, row) in enumerate(zip(choice["ids"], choice["logprobs"], strict=True)):
        same_row(rows, at, token, row, VOCAB if count < 0 else count)


@pytest.mark.parametrize("stream", [True, False])
async def test_greedy_ids_of_twenty_prompts(client: Client, offline: Any, stream: bool) -> None:
    """All at once: neither the neighbours nor the way they are sent changes an id."""
    requests = [client.request(c.prompt, stream=stream, **c.grpc) for c in GREEDY.values()]
    histories = await client.together(requests)
    for (name, case), history in zip(GREEDY.items(), histories, strict=True):
        same(history, offline[name], case)


@pytest.mark.parametrize("stream", [True, False])
async def test_greedy_ids_with_logprobs(client: Client, offline: Any, stream: bool) -> None:
    """The same ids, and each row has exactly what was asked for, best first."""
    requests = [client.request(c.prompt, stream=stream, **c.grpc) for c in LOGPROBS.values()]
    histories = await client.together(requests)
    for at, ((name, case), history) in enumerate(zip(LOGPROBS.items(), histories, strict=True)):
        same(history, offline[name], case)
        assert offline[name]["choices"][0]["ids"] == offline[f"greedy {at}"]["choices"][0]["ids"]
        if not stream:
            same_logprobs(history, offline[name], case.sampling["logprobs"])


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", SAMPLED)
async def test_sampled_ids(client: Client, offline: Any, name: str, stream: bool) -> None:
    """A seed, the filters, the penalties and n reach the engine as vLLM itself takes them."""
    case = SAMPLED[name]
    options = {"ignore_eos": False, **case.grpc}
    history = await client.generate(case.prompt, stream=stream, **options)
    same(history, offline[name], case)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", CONSTRAINED)
async def test_constraints(
    client: Client, offline: Any, words: Any, name: str, stream: bool
) -> None:
    """Each kind of the oneof; what comes out is what was asked for."""
    case = CONSTRAINED[name]
    history = await client.generate(case.prompt, stream=stream, **case.grpc)
    same(history, offline[name], case)
    text = words.decode(list(history.complete().output_ids))
    if name == "json_schema":
        assert set(json.loads(text)) == set(json.loads(SCHEMA)["required"])
    elif name == "choice":
        assert text in case.constraint["choice"]
    elif name == "structural_tag":
        assert text in ("<tool_call>one</tool_call>", "<tool_call>two</tool_call>")


async def test_prompt_logprobs(client: Client, offline: Any) -> None:
    """One entry per prompt token, the first without a value; -1 gives the whole vocabulary."""
    for name in ("prompt_logprobs", "all prompt_logprobs"):
        case, wanted = PROMPT_LOGPROBS[name], offline[name]["prompt_logprobs"]
        count = case.sampling["prompt_logprobs"]
        whole = await client.generate(case.prompt, stream=False, **case.grpc)
        same(whole, offline[name], case)
        streamed = await client.generate(case.prompt, **case.grpc)
        same(streamed, offline[name], case)
        rows = whole.complete().input_logprobs
        assert streamed.chunks[0].input_logprobs == rows
        assert list(rows.token_ids) == case.prompt
        assert not rows.token_logprobs[0].HasField("value")
        for at, (token, row) in enumerate(zip(case.prompt, wanted, strict=True)):
            if row is None:
                continue
            assert rows.token_logprobs[at].value == pytest.approx(row[str(token)][0], abs=CLOSE)
            best = top(row, VOCAB if count < 0 else count)
            found = rows.top_logprobs[at]
            assert len(found.token_ids) == len(best)
            pairs = dict(zip(found.token_ids, found.values, strict=True))
            assert pairs == pytest.approx(dict(best), abs=CLOSE)


async def test_minus_one_gives_every_row(client: Client, offline: Any) -> None:
    """V5: `logprobs=-1` used to give empty rows."""
    case = PROMPT_LOGPROBS["all logprobs"]
    history = await client.generate(case.prompt, stream=False, **case.grpc)
    same(history, offline["all logprobs"], case)
    same_logprobs(history, offline["all logprobs"], -1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", ["stop string", "stop string included"])
async def test_a_stop_string(client: Client, offline: Any, name: str, stream: bool) -> None:
    """It ends the output, is named, and all ids up to its own are there, as vLLM has them."""
    answer = offline[name]
    history = await client.generate(answer["prompt"], stream=stream, **answer["sampling"])
    assert history.code is grpc.StatusCode.OK, history.details
    assert check(history) == []
    complete = history.complete()
    (choice,) = answer["choices"]
    assert choice["finish"] == complete.finish_reason == "stop"
    assert list(complete.output_ids) == choice["ids"]
    assert complete.matched_stop_str == choice["stop"] == answer["sampling"]["stop"][0]
