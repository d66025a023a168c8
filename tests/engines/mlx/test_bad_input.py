"""Bad input costs its sender one INVALID_ARGUMENT and nobody else anything. Clamps beside it."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import check
from tests.engines.mlx.conftest import CONTEXT
from tests.support.mlx_client import VOCAB, Client, random_prompt
from tests.support.servers import Server

GOOD = random_prompt(5, seed=10)
PROMPT = "tokenized.input_ids"

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "empty prompt": (PROMPT, {"prompt": []}),
    "token at the vocabulary": (f"{PROMPT}[1]", {"prompt": [1, VOCAB]}),
    "token 100000": (f"{PROMPT}[0]", {"prompt": [100_000]}),
    "token 2^32-1": (f"{PROMPT}[2]", {"prompt": [1, 2, 2**32 - 1]}),
    "prompt of the context": (PROMPT, {"prompt": [3] * CONTEXT}),
    "prompt past the context": (PROMPT, {"prompt": [3] * (4 * CONTEXT)}),
    "empty text": ("text", {"text": ""}),
    "max_tokens 0": ("max_tokens", {"max_tokens": 0}),
    "temperature -1": ("temperature", {"temperature": -1.0}),
    "temperature nan": ("temperature", {"temperature": math.nan}),
    "temperature inf": ("temperature", {"temperature": math.inf}),
    "top_p 1.5": ("top_p", {"top_p": 1.5}),
    "top_p -0.1": ("top_p", {"top_p": -0.1}),
    "top_p nan": ("top_p", {"top_p": math.nan}),
    "min_p 2": ("min_p", {"min_p": 2.0}),
    "min_p -0.1": ("min_p", {"min_p": -0.1}),
    "min_p nan": ("min_p", {"min_p": math.nan}),
    "repetition_penalty -1": ("repetition_penalty", {"repetition_penalty": -1.0}),
    "repetition_penalty nan": ("repetition_penalty", {"repetition_penalty": math.nan}),
    "frequency_penalty nan": ("frequency_penalty", {"frequency_penalty": math.nan}),
    "presence_penalty inf": ("presence_penalty", {"presence_penalty": math.inf}),
    "logit_bias at the vocabulary": ("logit_bias", {"logit_bias": {VOCAB: 1.0}}),
    "logit_bias 5000": ("logit_bias", {"logit_bias": {5000: 5.0}}),
    "logit_bias 50257": ("logit_bias", {"logit_bias": {50257: -100.0}}),
    "logit_bias 2000000000": ("logit_bias", {"logit_bias": {2_000_000_000: 1.0}}),
    "logit_bias -1": ("logit_bias", {"logit_bias": {-1: 1.0}}),
    "logit_bias nan": ("logit_bias[7]", {"logit_bias": {7: math.nan}}),
    "stop id at the vocabulary": ("stop_token_ids", {"stop_token_ids": [VOCAB]}),
    "stop id 2^32-1": ("stop_token_ids", {"stop_token_ids": [3, 2**32 - 1]}),
    "logprobs -2": ("logprobs", {"logprobs": -2}),
}


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_refused_by_name(noise_client: Client, case: str) -> None:
    """P1, P2, P3: the field is named, and the next request is as good as ever."""
    field, options = BAD[case]
    prompt = options.get("prompt", GOOD)
    rest = {name: value for name, value in options.items() if name != "prompt"}
    for stream in (True, False):
        history = await noise_client.generate(prompt, stream=stream, **rest)
        assert history.code is grpc.StatusCode.INVALID_ARGUMENT, history
        assert history.messages == []
        said = history.details.split(":")[0]
        assert said in {field, f"sampling_params.{field}"}, history.details
        assert " at 0x" not in history.details
    good = await noise_client.generate(GOOD, max_tokens=4)
    assert check(good) == []


async def test_no_input_and_no_id_are_refused(noise_client: Client) -> None:
    pb = noise_client.pb
    missing = await noise_client.send(pb.GenerateRequest(request_id="no-input"))
    assert missing.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "input" in missing.details
    nameless = noise_client.request(GOOD, max_tokens=2)
    nameless.request_id = ""
    history = await noise_client.send(nameless)
    assert history.code is grpc.StatusCode.INVALID_ARGUMENT
    assert "request_id" in history.details
    assert check(await noise_client.generate(GOOD, max_tokens=2)) == []


async def test_neighbours_lose_nothing_to_bad_requests(
    noise_client: Client, noise_server: Server
) -> None:
    """P2, P3: all bad input beside two running streams: no token is lost, the log stays short."""
    prompts = [random_prompt(8, seed=11), random_prompt(20, seed=12)]
    alone = [await noise_client.ids(p, max_tokens=200) for p in prompts]
    lines = len(noise_server.log.splitlines())
    running = [asyncio.ensure_future(noise_client.generate(p, max_tokens=200)) for p in prompts]
    await noise_client.until_active(2)
    for _, options in BAD.values():
        rest = {name: value for name, value in options.items() if name != "prompt"}
        await noise_client.generate(options.get("prompt", GOOD), **rest)
    for ids, history in zip(alone, await asyncio.gather(*running), strict=True):
        assert check(history) == []
        assert history.streamed_ids() == ids
    assert len(noise_server.log.splitlines()) - lines < 10


async def test_max_tokens_past_the_room_is_clamped(noise_client: Client) -> None:
    """P11: the output fills what the prompt leaves of the context, and not a token more."""
    prompt = random_prompt(CONTEXT - 12, seed=13)
    complete = (await noise_client.generate(prompt, max_tokens=100_000)).complete()
    assert len(complete.output_ids) == 12
    assert complete.finish_reason == "length"
    unset = (await noise_client.generate(prompt, ignore_eos=True)).complete()
    assert list(unset.output_ids) == list(complete.output_ids)
    longest = (
        await noise_client.generate([*prompt, *range(3, 14)], max_tokens=2**32 - 1)
    ).complete()
    assert longest.prompt_tokens == CONTEXT - 1
    assert len(longest.output_ids) == 1


async def test_filters_that_filter_nothing_are_off(noise_client: Client) -> None:
    """P3: top_k past the vocabulary, top_p 0 or unset, zero penalties: as if not given."""
    prompt = random_prompt(6, seed=14)
    sampled = {"temperature": 1.0, "seed": 5, "max_tokens": 16}
    plain = await noise_client.ids(prompt, **sampled)
    for off in (
        {"top_k": VOCAB},
        {"top_k": VOCAB + 1},
        {"top_k": 10_000_000},
        {"top_k": 2**32 - 1},
        {"top_k": 0},
        {"top_p": 0.0},
        {"top_p": 1.0},
        {"min_p": 0.0},
        {"repetition_penalty": 0.0},
        {"frequency_penalty": 0.0, "presence_penalty": 0.0},
    ):
        assert await noise_client.ids(prompt, **sampled, **off) == plain, off


async def test_the_filters_do_filter(noise_client: Client) -> None:
    """One id left by top_k, top_p or min_p is the greedy one, whatever the seed."""
    prompt = random_prompt(6, seed=15)
    greedy = await noise_client.ids(prompt, max_tokens=12)
    for one in ({"top_k": 1}, {"top_p": 1e-6}, {"min_p": 1.0}):
        ids = await noise_client.ids(prompt, max_tokens=12, temperature=1.5, seed=3, **one)
        assert ids == greedy, one


async def test_a_temperature_near_zero_is_greedy(noise_client: Client) -> None:
    """P8: nothing overflows: 1e-6 and the smallest float are greedy."""
    prompt = random_prompt(6, seed=16)
    greedy = await noise_client.ids(prompt, max_tokens=20)
    for temperature in (1e-6, 1e-38):
        assert await noise_client.ids(prompt, max_tokens=20, temperature=temperature) == greedy


async def test_an_unset_temperature_samples(noise_client: Client) -> None:
    """Unset is 1.0, not greedy."""
    prompt = random_prompt(6, seed=17)
    request = noise_client.request(prompt, max_tokens=20, seed=9)
    request.sampling_params.ClearField("temperature")
    unset = list((await noise_client.send(request)).complete().output_ids)
    assert unset == await noise_client.ids(prompt, max_tokens=20, seed=9, temperature=1.0)
    assert unset != await noise_client.ids(prompt, max_tokens=20)
