"""Requests that would kill or wedge the engine: refused one by one, and nothing else is hurt.

Seen without the guard, smg 1.13.0 and vLLM 0.32: those with a prompt that is empty, too long or
outside the vocabulary, and a logit bias outside it, end the engine; a schema that is no object and
a temperature above 2 cannot be decoded there and end the thread that reads requests; media for a
text model are never answered. Nor are prompt logprobs, which are sent in another form instead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2

from tests.support.client import Client
from tests.support.real_vllm import CONTEXT, engine_core
from tests.support.servers import Server
from tests.support.vllm_cases import VOCAB, prompt

SECONDS = 10
INTERNAL = grpc.StatusCode.INTERNAL
INVALID = grpc.StatusCode.INVALID_ARGUMENT


def sampled(**options: Any) -> Callable[[Client], Any]:
    return lambda client: client.request(prompt(4), max_tokens=4, **options)


def prompted(ids: list[int]) -> Callable[[Client], Any]:
    return lambda client: client.request(ids, max_tokens=4)


def unsampled(client: Client) -> Any:
    request = client.request(prompt(4))
    request.ClearField("sampling_params")
    return request


def with_media(client: Client) -> Any:
    request = client.request(prompt(4), max_tokens=4)
    batch = request.mm_inputs
    batch.modality = common_pb2.IMAGE
    batch.pixel_values.inline = bytes(16)
    batch.pixel_values.shape.extend([1, 4])
    batch.pixel_values.dtype = "float32"
    batch.mm_placeholders.add(offset=0, length=1)
    batch.mm_hashes.append("h")
    return request


def with_transfer(client: Client) -> Any:
    request = client.request(prompt(4), max_tokens=4)
    request.kv_transfer_params_json = '{"do_remote_prefill": true}'
    return request


def with_reference(client: Client) -> Any:
    request = client.request(prompt(4), max_tokens=4)
    request.media_refs.items.add(url="data:image/png;base64,AAAA", modality=common_pb2.IMAGE)
    return request


BAD = {
    "no prompt": (prompted([]), INTERNAL),
    "a prompt of the context": (prompted([5] * CONTEXT), INTERNAL),
    "a prompt of twice the context": (prompted([5] * 2 * CONTEXT), INTERNAL),
    "an id past the vocabulary": (prompted([5, VOCAB]), INTERNAL),
    "a huge id": (prompted([5, 2**32 - 1]), INTERNAL),
    "a bias past the vocabulary": (sampled(logit_bias={VOCAB: 1.0}), INTERNAL),
    "a huge stop id": (sampled(stop_token_ids=[2**32 - 1], min_tokens=2), INTERNAL),
    "a temperature above 2": (sampled(temperature=1e38), INTERNAL),
    "a schema that is a list": (sampled(json_schema="[1]"), INTERNAL),
    "a schema that is no JSON": (sampled(json_schema="{"), INTERNAL),
    "a grammar that is none": (sampled(grammar="root ::= ((("), INTERNAL),
    "a regex that is none": (sampled(regex="(("), INTERNAL),
    "no sampling parameters": (unsampled, INTERNAL),
    "media for a text model": (with_media, INTERNAL),
    "media by reference, unprocessed": (with_reference, INVALID),
    "a prefill from nowhere": (with_transfer, INTERNAL),
}


@pytest.mark.parametrize("name", BAD)
async def test_it_is_refused_and_the_rest_goes_on(
    client: Client, server: Server, name: str
) -> None:
    make, status = BAD[name]
    core = engine_core(server)
    beside, history = await client.begin(prompt(5), max_tokens=60)
    refused = await asyncio.wait_for(client.send(make(client)), SECONDS)
    assert refused.code is status, refused.details
    history = await history.record(beside)
    assert history.code is grpc.StatusCode.OK, history.details
    assert len(history.complete().output_ids) == 60
    assert engine_core(server) == core
    assert len(await asyncio.wait_for(client.ids(prompt(3), max_tokens=2), SECONDS)) == 2


async def test_why_stands_in_the_log_in_one_line(client: Client, server: Server) -> None:
    request = client.request([5, VOCAB], request_id="told-why", max_tokens=1)
    await client.send(request)
    await server.printed(rf"request told-why\S* is refused: prompt: id {VOCAB}; allowed: 0 to 1023")


async def test_prompt_logprobs_are_told(client: Client) -> None:
    """vLLM 0.32 sends them in a form that wheels drop, without a word to anybody."""
    ids = prompt(5)
    asked = client.generate(ids, max_tokens=1, prompt_logprobs=2)
    history = await asyncio.wait_for(asked, 60)  # the first logprobs make vLLM compile
    assert history.code is grpc.StatusCode.OK, history.details
    told = history.complete().input_logprobs
    assert list(told.token_ids) == ids
    assert [row.HasField("value") for row in told.token_logprobs] == [False, *[True] * 4]
    assert [len(row.values) for row in told.top_logprobs] == [0, *[2] * 4]
    own = [row.value for row in told.token_logprobs[1:]]
    best = [max(row.values) for row in told.top_logprobs[1:]]
    assert all(value <= most < 0 for value, most in zip(own, best, strict=True))
