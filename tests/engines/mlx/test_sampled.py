"""Log-probabilities and seeds over the wire."""

from __future__ import annotations

import asyncio
import math
from time import monotonic
from typing import Any

import pytest

from smg_grpc_servicer.testing.history import History, check
from tests.support.mlx_client import VOCAB, Client, random_prompt


def rows(history: History) -> list[tuple[float, int, list[float], list[int]]]:
    """Value, id, best values and best ids of each output token."""
    parts = history.chunks if history.stream else history.completes
    return [
        (value, token, list(top.values), list(top.token_ids))
        for part in parts
        for value, token, top in zip(
            part.output_logprobs.token_logprobs,
            part.output_logprobs.token_ids,
            part.output_logprobs.top_logprobs,
            strict=True,
        )
    ]


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("count", [1, 5, 20])
async def test_logprobs_are_in_step_and_sorted(
    noise_client: Client, stream: bool, count: int
) -> None:
    """E6: one row for every id, best first, the greedy id being the best."""
    history = await noise_client.generate(
        random_prompt(5, seed=20), stream=stream, logprobs=count, max_tokens=12
    )
    assert check(history, logprobs=count) == []
    got = rows(history)
    assert [token for _, token, _, _ in got] == list(history.complete().output_ids)
    for value, token, values, ids in got:
        assert ids[0] == token
        assert values[0] == value
        assert len(set(ids)) == count
        assert all(v <= 0 for v in values)


async def test_minus_one_and_more_than_all_give_the_vocabulary(noise_client: Client) -> None:
    """P8: whole rows are float32 and their probabilities sum to one."""
    prompt = random_prompt(5, seed=21)
    history = await noise_client.generate(prompt, logprobs=-1, max_tokens=6)
    got = rows(history)
    assert len(got) == 6
    for _, _, values, ids in got:
        assert sorted(ids) == list(range(VOCAB))
        assert values == sorted(values, reverse=True)
        assert math.fsum(map(math.exp, values)) == pytest.approx(1, abs=1e-5)
    assert check(history, logprobs=VOCAB) == []
    more = await noise_client.generate(prompt, logprobs=5000, max_tokens=6)
    assert check(more, logprobs=VOCAB) == []
    assert rows(more) == got


async def test_zero_and_unset_give_none(noise_client: Client) -> None:
    prompt = random_prompt(5, seed=22)
    assert check(await noise_client.generate(prompt, logprobs=0, max_tokens=4)) == []
    assert check(await noise_client.generate(prompt, max_tokens=4)) == []


async def test_logprobs_tell_what_sampling_draws_from(noise_client: Client) -> None:
    """Before temperature and filters, after bias: the drawn id has its own value."""
    prompt = random_prompt(5, seed=23)
    sampled = {"temperature": 2.0, "seed": 1, "max_tokens": 20}
    history = await noise_client.generate(prompt, logprobs=-1, **sampled)
    for value, token, values, ids in rows(history):
        assert values[ids.index(token)] == pytest.approx(value, abs=1e-6)
    assert any(ids[0] != token for _, token, _, ids in rows(history))
    assert await noise_client.ids(prompt, **sampled) == list(history.complete().output_ids)


async def test_logprobs_do_not_change_with_the_neighbours(noise_client: Client) -> None:
    """Different widths in one batch: each row gets its own, equal to those it gets alone."""
    prompts = [random_prompt(6, seed=30 + i) for i in range(6)]
    widths: list[int | None] = [None, 1, 5, -1, 20, None]
    requests = [
        noise_client.request(p, logprobs=w, max_tokens=10)
        for p, w in zip(prompts, widths, strict=True)
    ]
    together = await noise_client.together(requests)
    for prompt, width, history in zip(prompts, widths, together, strict=True):
        size = VOCAB if width == -1 else width
        assert check(history, logprobs=size) == []
        alone = await noise_client.generate(prompt, logprobs=width, max_tokens=10)
        for mine, theirs in zip(rows(alone), rows(history), strict=True):
            assert mine[1] == theirs[1]
            assert mine[0] == pytest.approx(theirs[0], abs=1e-4)


async def test_health_answers_while_logprobs_are_computed(noise_client: Client) -> None:
    """P9: log-probabilities are no work of the event loop: 16 streams of 20 do not silence it."""
    requests = [
        noise_client.request(random_prompt(6, seed=40 + i), logprobs=20, max_tokens=100)
        for i in range(16)
    ]
    running = asyncio.gather(*map(noise_client.send, requests))
    waits = []
    while not running.done():
        start = monotonic()
        await noise_client.stub.HealthCheck(noise_client.pb.HealthCheckRequest(), timeout=5)
        waits.append(monotonic() - start)
    histories = await running
    assert [check(h, logprobs=20) for h in histories] == [[]] * 16
    assert len(waits) > 10
    assert sorted(waits)[len(waits) // 2] < 0.1


@pytest.mark.parametrize("seed", [0, 7, -1, 2**31 - 1])
async def test_a_seed_gives_the_same_again(noise_client: Client, seed: int) -> None:
    """P4, F9: the same seed the same text, also seed 0 and a negative one."""
    prompt = random_prompt(5, seed=50)
    runs = [
        await noise_client.ids(prompt, seed=seed, temperature=1.0, max_tokens=24) for _ in range(3)
    ]
    assert runs[0] == runs[1] == runs[2]


async def test_seeds_and_no_seed_differ(noise_client: Client) -> None:
    """P4: different seeds, and no seed, give different texts."""
    prompt = random_prompt(5, seed=51)
    seeded = [
        await noise_client.ids(prompt, seed=s, temperature=1.0, max_tokens=24) for s in range(4)
    ]
    free = [await noise_client.ids(prompt, temperature=1.0, max_tokens=24) for _ in range(4)]
    assert len({tuple(ids) for ids in (*seeded, *free)}) == 8


async def test_a_seed_holds_in_a_mixed_batch(noise_client: Client) -> None:
    """P4: beside greedy, unseeded and filtered rows a seeded row draws what it draws alone."""
    prompts = [random_prompt(4 + i, seed=52) for i in range(12)]
    kinds: list[dict[str, Any]] = [
        {"seed": 3, "temperature": 1.0},
        {},
        {"temperature": 1.3},
        {"seed": 3, "temperature": 0.8, "top_p": 0.9},
        {"seed": 4, "temperature": 1.0, "top_k": 12, "min_p": 0.01},
        {"seed": 5, "temperature": 1.0, "presence_penalty": 0.5},
    ]
    settings = [kinds[i % len(kinds)] for i in range(12)]
    alone = [
        await noise_client.ids(p, max_tokens=24, **s)
        for p, s in zip(prompts, settings, strict=True)
    ]
    together = await noise_client.together(
        [
            noise_client.request(p, max_tokens=24, **s)
            for p, s in zip(prompts, settings, strict=True)
        ]
    )
    for setting, ids, history in zip(settings, alone, together, strict=True):
        if setting and "seed" not in setting:
            continue
        assert list(history.complete().output_ids) == ids, setting


async def test_a_seed_gives_text_on_a_stream_as_on_a_whole_answer(noise_client: Client) -> None:
    prompt = random_prompt(5, seed=53)
    settings = {"seed": 11, "temperature": 1.0, "max_tokens": 24}
    streamed = await noise_client.generate(prompt, **settings)
    whole = await noise_client.ids(prompt, stream=False, **settings)
    assert streamed.streamed_ids() == whole
