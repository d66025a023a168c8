"""Bad input costs its sender one INVALID_ARGUMENT, by name, and the real engine nothing."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import check
from tests.support.client import Client
from tests.support.real_vllm import CONTEXT
from tests.support.servers import Server
from tests.support.vllm_cases import VOCAB, prompt

GOOD = prompt(5, 20)
PROMPT = "tokenized.input_ids"
KV = "kv_transfer_params_json"

BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "empty prompt": (PROMPT, {"prompt": []}),
    "token at the vocabulary": (f"{PROMPT}[1]", {"prompt": [1, VOCAB]}),
    "token 4000000000": (f"{PROMPT}[0]", {"prompt": [4_000_000_000]}),
    "prompt of the context": (PROMPT, {"prompt": [3] * CONTEXT}),
    "prompt past the context": (PROMPT, {"prompt": [3] * 2 * CONTEXT}),
    "empty text": ("text", {"text": ""}),
    "max_tokens 0": ("max_tokens", {"max_tokens": 0}),
    "min_tokens past max_tokens": ("min_tokens", {"min_tokens": 3, "max_tokens": 2}),
    "temperature -1": ("temperature", {"temperature": -1.0}),
    "temperature nan": ("temperature", {"temperature": math.nan}),
    "temperature inf": ("temperature", {"temperature": math.inf}),
    "top_p 1.5": ("top_p", {"top_p": 1.5}),
    "top_p -0.5": ("top_p", {"top_p": -0.5}),
    "min_p 2": ("min_p", {"min_p": 2.0}),
    "frequency_penalty 5": ("frequency_penalty", {"frequency_penalty": 5.0}),
    "presence_penalty -5": ("presence_penalty", {"presence_penalty": -5.0}),
    "presence_penalty nan": ("presence_penalty", {"presence_penalty": math.nan}),
    "repetition_penalty -1": ("repetition_penalty", {"repetition_penalty": -1.0}),
    "n 100000": ("n", {"n": 100_000, "temperature": 1.0}),
    "n 2, greedy": ("n", {"n": 2}),
    "logprobs -2": ("logprobs", {"logprobs": -2}),
    "logprobs past the limit": ("logprobs", {"logprobs": VOCAB + 1}),
    "prompt_logprobs past the limit": ("prompt_logprobs", {"prompt_logprobs": VOCAB + 1}),
    "logit_bias out of the vocabulary": ("logit_bias", {"logit_bias": {100_000: 1.0}}),
    "logit_bias -1": ("logit_bias", {"logit_bias": {-1: 1.0}}),
    "stop id out of the vocabulary": ("stop_token_ids", {"stop_token_ids": [999_999]}),
    "empty stop string": ("stop", {"stop": [""]}),
    "truncate_prompt_tokens -2": ("truncate_prompt_tokens", {"truncate_prompt_tokens": -2}),
    "truncate_prompt_tokens 5000": ("truncate_prompt_tokens", {"truncate_prompt_tokens": 5000}),
    "json_schema no JSON": ("json_schema", {"json_schema": "{"}),
    "json_schema of no type": ("json_schema", {"json_schema": '{"type": "nonsense"}'}),
    "regex": ("regex", {"regex": "(("}),
    "grammar": ("grammar", {"grammar": "this is not a grammar ::="}),
    "structural_tag": ("structural_tag", {"structural_tag": '{"type": "structural_tag"}'}),
    "rank 1 of one": ("data_parallel_rank", {"request": {"data_parallel_rank": 1}}),
    "rank -1": ("data_parallel_rank", {"request": {"data_parallel_rank": -1}}),
    "no connector": (KV, {"request": {KV: '{"do_remote_prefill": true}'}}),
    "kv no JSON": (KV, {"request": {KV: "{do"}}),
    "kv empty": (KV, {"request": {KV: ""}}),
    "kv no object": (KV, {"request": {KV: "[1]"}}),
    "kv nan": (KV, {"request": {KV: '{"a": NaN}'}}),
    "kv nested": (KV, {"request": {KV: '{"a":' * 490 + "1" + "}" * 490}}),
    "kv half a character": (KV, {"request": {KV: '{"a": "\\ud800"}'}}),
    "truncate_prompt_tokens 0": ("truncate_prompt_tokens", {"truncate_prompt_tokens": 0}),
    "100,000 stop strings": ("stop", {"stop": [f"zz{at}q" for at in range(100_000)]}),
    "a stop string of 20,000": ("stop", {"stop": ["z" * 20_000]}),
    "text that cannot fit": ("text", {"text": "a" * 2_000_000}),
    "json_schema of a huge number": (
        "json_schema",
        {"json_schema": '{"type": "integer", "minimum": ' + "9" * 5000 + "}"},
    ),
    "no id": ("request_id", {"request": {"request_id": ""}}),
}


def request(client: Client, options: dict[str, Any], *, stream: bool = True) -> Any:
    rest = {name: v for name, v in options.items() if name not in ("prompt", "request")}
    rest = {"max_tokens": 4, **rest}
    made = client.request(options.get("prompt", GOOD), stream=stream, **rest)
    for name, value in options.get("request", {}).items():
        setattr(made, name, value)
    return made


@pytest.mark.parametrize("case", BAD)
async def test_bad_input_is_refused_by_name(client: Client, case: str) -> None:
    """The field is named, no object's address is, and the next request is as good as ever."""
    field, options = BAD[case]
    for stream in (True, False):
        history = await client.send(request(client, options, stream=stream))
        assert history.code is grpc.StatusCode.INVALID_ARGUMENT, history
        assert history.messages == []
        assert history.details.split(":")[0] in {field, f"sampling_params.{field}"}
        assert history.details.partition(":")[2].strip()
        assert " at 0x" not in history.details
    assert check(await client.generate(GOOD, max_tokens=2)) == []


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("kind", "value"),
    [
        ("json_schema", '{"$ref": "#"}'), ("grammar", "root ::= root"), ("regex", r"[^\s\S]"),
    ],
)  # fmt: skip
async def test_a_constraint_that_allows_no_token_is_its_senders(
    client: Client, kind: str, value: str, stream: bool
) -> None:
    """R2: it compiles, and fails at the first token; no fault of the worker."""
    history = await client.generate(GOOD, stream=stream, max_tokens=4, **{kind: value})
    assert history.code is grpc.StatusCode.INVALID_ARGUMENT, history
    assert history.details.startswith(f"sampling_params.{kind}: ")
    assert check(await client.generate(GOOD, max_tokens=2)) == []


async def test_no_input_and_a_bad_legacy_host_are_refused(client: Client) -> None:
    bare = await client.send(client.pb.GenerateRequest(request_id="no-input"))
    assert bare.code is grpc.StatusCode.INVALID_ARGUMENT
    assert bare.details.startswith("input")
    for host, port, field in (
        ("", 5, "remote_host"),
        ("h", 0, "remote_port"),
        ("h", 70000, "remote_port"),
    ):
        legacy = request(client, {})
        legacy.kv_transfer_params.remote_host = host
        legacy.kv_transfer_params.remote_port = port
        history = await client.send(legacy)
        assert history.code is grpc.StatusCode.INVALID_ARGUMENT, history
        assert history.details.startswith(f"kv_transfer_params.{field}")


async def test_media_is_unimplemented_for_a_text_model(client: Client) -> None:
    references, tensors = request(client, {}), request(client, {})
    references.media_refs.items.add()
    tensors.mm_inputs.mm_hashes.append("one")
    for made in (references, tensors):
        history = await client.send(made)
        assert history.code is grpc.StatusCode.UNIMPLEMENTED, history
        assert "multimodal input" in history.details


async def test_neighbours_lose_nothing_to_bad_requests(client: Client, server: Server) -> None:
    """All bad input beside two running streams: no token is lost, the log stays short."""
    prompts = [prompt(8, 21), prompt(20, 21)]
    alone = [await client.ids(p, max_tokens=300) for p in prompts]
    lines = len(server.log.splitlines())
    running = [asyncio.ensure_future(client.generate(p, max_tokens=300)) for p in prompts]
    await client.until_active(2)
    for _, options in BAD.values():
        await client.send(request(client, options))
    for ids, history in zip(alone, await asyncio.gather(*running), strict=True):
        assert check(history) == []
        assert history.streamed_ids() == ids
    assert len(server.log.splitlines()) - lines < 10


async def test_constraints_that_ask_for_nothing_are_none(client: Client) -> None:
    """`json_object=false` and empty ones used to fail deep in the engine."""
    plain = await client.ids(GOOD, max_tokens=6)
    empty: dict[str, Any] = {"json_object": False, "json_schema": "", "regex": "", "choice": []}
    for name, nothing in empty.items():
        assert await client.ids(GOOD, max_tokens=6, **{name: nothing}) == plain, name


async def test_max_tokens_past_the_room_is_clamped(client: Client) -> None:
    """The output fills what the prompt leaves of the context, and not a token more."""
    complete = (await client.generate(prompt(CONTEXT - 5, 22), max_tokens=100_000)).complete()
    assert len(complete.output_ids) == 5
    assert complete.finish_reason == "length"
    longest = (await client.generate([3] * (CONTEXT - 1), max_tokens=8)).complete()
    assert longest.prompt_tokens == CONTEXT - 1
    assert len(longest.output_ids) == 1
