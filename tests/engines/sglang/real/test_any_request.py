"""Requests with anything in any field: the scheduler outlives them all, and each is told why."""

from __future__ import annotations

import os
from collections import Counter
from itertools import islice
from typing import Any

import grpc

from smg_grpc_servicer.testing.history import History, check
from tests.support.client import Client
from tests.support.proto_fuzz import Mutants, names_a_field
from tests.support.servers import Server
from tests.support.sglang_cases import VOCAB, prompt

SEED = int(os.environ.get("SMG_FUZZ_SEED", "0"))
CODE = grpc.StatusCode
GOOD = prompt(6, 90)
WORDS = ("root ::= root", 'root ::= "a"', "((", "a{0}", "[a-c]+", "{", "{}", "null", '{"enum": []}')
CIRCLE = '{"$defs": {"a": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}'
ODD: dict[str, tuple[Any, ...]] = {
    "tokenized.input_ids": (0, 5, VOCAB - 1, VOCAB),
    "sampling_params.max_new_tokens": (0, 1, 9),
    "sampling_params.n": (2, 5),
    "sampling_params.top_k": (1, VOCAB, VOCAB + 1),
    "sampling_params.repetition_penalty": (1e-45, 1e-30, 1e-21, 0.5, 2.0),
    "sampling_params.temperature": (1.1e-6, 1e-5, 0.5, 1.0),
    "sampling_params.logit_bias.key": ("5", "6", str(VOCAB)),
    "sampling_params.stop_token_ids": (0, 7, VOCAB - 1),
    "sampling_params.min_new_tokens": (1, 3),
    "sampling_params.regex": WORDS,
    "sampling_params.json_schema": (*WORDS, CIRCLE),
    "sampling_params.ebnf_grammar": WORDS,
    "sampling_params.structural_tag": (*WORDS, '{"structures": [{}], "triggers": ["a"]}'),
    "token_ids_logprob": (0, 5, VOCAB - 1),
    "top_logprobs_num": (1, 5, VOCAB + 1),
    "logprob_start_len": (-1, 0, 2, 6),
    "data_parallel_rank": (0, 1),
}
"""By path, beside the ends of the field's type."""
ANSWERS = {
    CODE.OK,
    CODE.INVALID_ARGUMENT,
    CODE.UNIMPLEMENTED,
    CODE.FAILED_PRECONDITION,
    CODE.RESOURCE_EXHAUSTED,
    CODE.ALREADY_EXISTS,
}
"""What is neither a fault of the worker nor a sign that it is gone."""


async def test_nothing_in_a_request_ends_the_scheduler(client: Client, server: Server) -> None:
    """Each has a clear status that names its field, and the next one is answered as ever."""
    good = client.request(GOOD, max_tokens=4, temperature=1.0, top_p=0.9)
    good.request_id = ""
    expected = await client.ids(GOOD, max_tokens=4)
    seen: Counter[str] = Counter()
    mutants = iter(Mutants(good, ODD, SEED, alone=("mm_inputs", "input_embeds", "lora_id")))
    for part in range(25):
        requests = list(islice(mutants, 16))
        for at, request in enumerate(requests):
            request.request_id = request.request_id or f"any-{part}-{at}"
        for request, history in zip(requests, await client.together(requests), strict=True):
            assert history.code is not None
            seen[history.code.name] += 1
            wrong = _wrong(request, history)
            assert not wrong, f"seed {SEED}: {wrong}\n{history.details}\n{request}"
        assert await client.ids(GOOD, max_tokens=4) == expected
    assert server.running
    assert seen["OK"] > 80, seen
    assert seen["INVALID_ARGUMENT"] > 80, seen


async def test_a_constraint_that_allows_no_token_costs_its_sender_alone(client: Client) -> None:
    """Nothing finite is left to sample from, over which the scheduler ended; in one batch with
    others, greedy or not.
    """
    wanted = await client.ids(GOOD, max_tokens=40)
    hopeless = [
        client.request(GOOD, temperature=warmth, top_p=0.9, **constraint)
        for warmth in (0.0, 1.0)
        for constraint in ({"grammar": "root ::= root"}, {"json_schema": CIRCLE})
    ]
    good = client.request(GOOD, max_tokens=40)
    *lost, history = await client.together([*hopeless, good])
    assert [each.code for each in lost] == [CODE.FAILED_PRECONDITION] * len(hopeless)
    assert list(history.complete().output_ids) == wanted


async def test_bytes_that_are_nearly_a_request(client: Client, server: Server) -> None:
    """What cannot be read is refused, what can is a request like any other."""
    good = client.request(GOOD, "bytes", max_tokens=4, stop=["a"], logit_bias={5: 1.0})
    method = client.channel.unary_stream(
        f"/{client.dialect.service}/Generate",
        request_serializer=bytes,
        response_deserializer=client.pb.GenerateResponse.FromString,
    )
    for data in islice(Mutants(good, ODD, SEED).bytes(), 150):
        history = await History().record(method(data))
        assert history.code in ANSWERS, f"seed {SEED}: {history.code} {history.details}\n{data!r}"
    assert len(await client.ids(GOOD, max_tokens=4)) == 4
    assert server.running


def _wrong(request: Any, history: History) -> object:
    if history.code not in ANSWERS:
        return history.code
    if history.code is CODE.INVALID_ARGUMENT:
        return not names_a_field(history.details, request.DESCRIPTOR)
    if history.code is CODE.OK and not request.token_ids_logprob:  # whose rows come twice
        wanted = request.top_logprobs_num if request.return_logprob else None
        return check(history, max(1, request.sampling_params.n), logprobs=wanted)
    return not history.details if history.code is not CODE.OK else None
