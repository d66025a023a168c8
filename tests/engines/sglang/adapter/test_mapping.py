"""What a request says arrives at the scheduler; what would end the scheduler does not."""

from __future__ import annotations

import asyncio
import json
import math
import pickle
import re
from collections.abc import Callable
from typing import Any

import grpc
import pytest
from sglang.srt.sampling.custom_logit_processor import (
    DisallowedTokensLogitsProcessor,
)
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.types import ModelFacts
from smg_grpc_servicer.sglang.limits import Limits
from tests.support.sglang_served import LIMITS, ServedSglang, pixels, request, served_sglang
from tests.support.sglang_stub import Row, batch, stop
from tests.support.wait import until

CODE = grpc.StatusCode
ALL = Limits(
    max_prompt_tokens=4000,
    logit_processors=True,
    hidden_states="last",
    prefix_cache=False,
    hidden_size=2,
    media=True,
)
PROCESSOR = DisallowedTokensLogitsProcessor.to_str()


async def arrived(server: ServedSglang, **fields: Any) -> Any:
    call = server.stub.Generate(request(**fields))
    (sent,) = await server.sent()
    call.cancel()
    return sent


@pytest.mark.parametrize(
    ("params", "name", "value"),
    [
        ({"temperature": 0.5}, "temperature", 0.5),
        ({"temperature": 0.0}, "top_k", 1),
        ({"temperature": 1.0}, "top_k", TOP_K_ALL),
        ({"temperature": 1.0, "top_k": 5}, "top_k", 5),
        ({"top_p": 0.5}, "top_p", 0.5),
        ({"min_p": 0.25}, "min_p", 0.25),
        ({"frequency_penalty": 0.5}, "frequency_penalty", 0.5),
        ({"presence_penalty": 0.5}, "presence_penalty", 0.5),
        ({}, "repetition_penalty", 1.0),
        ({"repetition_penalty": 1.5}, "repetition_penalty", 1.5),
        ({"max_new_tokens": 7}, "max_new_tokens", 7),
        ({"max_new_tokens": None}, "max_new_tokens", None),
        ({"min_new_tokens": 2}, "min_new_tokens", 2),
        ({"stop": ["END"]}, "stop_strs", ["END"]),
        ({"stop": ["END"]}, "stop_str_max_len", 3),
        ({"stop_token_ids": [7, 8]}, "stop_token_ids", {7, 8}),
        ({"ignore_eos": True}, "ignore_eos", True),
        ({"no_stop_trim": True}, "no_stop_trim", True),
        ({"stream_interval": 3}, "stream_interval", 3),
        ({"logit_bias": {"7": 1.5}}, "logit_bias", {"7": 1.5}),
        ({"regex": "a+"}, "regex", "a+"),
        ({"json_schema": "{}"}, "json_schema", "{}"),
        ({"ebnf_grammar": "root ::= 'a'"}, "ebnf", "root ::= 'a'"),
        ({"structural_tag": "{}"}, "structural_tag", "{}"),
        ({}, "is_normalized", True),
    ],
)
async def test_a_sampling_parameter_arrives(params: Any, name: str, value: Any) -> None:
    async with served_sglang() as server:
        sent = await arrived(server, params=params)
        assert getattr(sent.sampling_params, name) == value


@pytest.mark.parametrize(
    ("fields", "name", "value"),
    [
        ({}, "stream", True),
        ({"stream": False}, "stream", False),
        ({}, "return_logprob", False),
        ({}, "logprob_start_len", -1),
        ({"return_logprob": True, "logprob_start_len": -1}, "logprob_start_len", -1),
        ({"return_logprob": True, "logprob_start_len": 2}, "logprob_start_len", 2),
        ({"require_reasoning": True}, "require_reasoning", True),
        ({"custom_logit_processor": PROCESSOR}, "custom_logit_processor", PROCESSOR),
        ({"return_hidden_states": True}, "return_hidden_states", "last"),
        ({"data_parallel_rank": 0}, "routed_dp_rank", 0),
        ({"data_parallel_rank": 1}, "routed_dp_rank", 1),
        ({}, "routed_dp_rank", None),
        ({"input_embeds": [0.5, 1.0, 1.5, 2.0]}, "input_embeds", [[0.5, 1.0], [1.5, 2.0]]),
    ],
)
async def test_row_14_a_field_beside_them_arrives(fields: Any, name: str, value: Any) -> None:
    """§11-14: nothing is dropped without a word."""
    async with served_sglang(limits=ALL, ranks=2) as server:
        sent = await arrived(server, **fields)
        assert getattr(sent, name) == value
        assert sent.input_ids.typecode == "q"


async def test_input_embeddings_need_no_ids() -> None:
    async with served_sglang(limits=ALL) as server:
        asked = pb.GenerateRequest(request_id="r", input_embeds=[0.5, 1.0], stream=True)
        call = server.stub.Generate(asked)
        (sent,) = await server.sent()
        assert sent.input_embeds == [[0.5, 1.0]]
        call.cancel()


async def test_row_21_whole_numbers_stay_whole() -> None:
    """§11-21: a Struct knows only floats, and SGLang's checks want integers."""
    async with served_sglang() as server:
        custom = {"ids": [1, 2], "budget": 3, "share": 0.5, "name": "x", "on": True, "none": None}
        sent = await arrived(server, params={"custom_params": custom})
        got = sent.sampling_params.custom_params
        assert got == custom
        assert [type(got[name]) for name in ("budget", "share", "on")] == [int, float, bool]
        assert all(type(item) is int for item in got["ids"])


@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_bootstrap_fields_arrive_and_choices_have_rooms_of_their_own(role: str) -> None:
    limits = Limits(role=role)
    async with served_sglang(limits=limits) as server:
        kv = {"bootstrap_host": "h", "bootstrap_port": 80, "bootstrap_room": 5}
        call = server.stub.Generate(
            request(disaggregated_params=kv, params={"n": 2}, prompt=[5] * 1024)
        )
        sent = await server.sent(2)
        found = [(s.bootstrap_host, s.bootstrap_port, s.bootstrap_room) for s in sent]
        assert found == [("h", 80, 5), ("h", 80, 6)]
        call.cancel()


async def test_a_prefill_goes_where_its_decode_will_look() -> None:
    async with served_sglang(limits=Limits(role="prefill"), ranks=2) as server:
        kv = {"bootstrap_host": "h", "bootstrap_room": 5}
        sent = await arrived(server, disaggregated_params=kv, data_parallel_rank=0)
        assert sent.routed_dp_rank == 1


async def test_row_29_media_tensors_arrive() -> None:
    async with served_sglang(limits=ALL) as server:
        sent = await arrived(server, mm_inputs=pixels())
        (item,) = sent.mm_inputs.mm_items
        assert item.feature.tolist() == [[1.0, 2.0], [3.0, 4.0]]
        assert item.image_grid_thw.tolist() == [[1, 1, 1]]
        assert list(map(tuple, item.offsets)) == [(1, 2)]
        assert item.is_image()
        assert sent.mm_inputs.im_token_id == 6


NO_PROCESSOR = json.dumps({"callable": pickle.dumps(dict).hex()})
KV = {"bootstrap_host": "h", "bootstrap_room": 5}


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"prompt": []}, "tokenized.input_ids"),
        ({"prompt": [5, 1000]}, r"tokenized.input_ids\[1\]"),
        ({"prompt": [5] * 4000}, "tokenized.input_ids"),
        ({"params": {"logit_bias": {"1000": 1.0}}}, "sampling_params.logit_bias"),
        ({"params": {"logit_bias": {"7": 1e31}}}, r"sampling_params.logit_bias\[7\]"),
        ({"params": {"repetition_penalty": 1e-21}}, "sampling_params.repetition_penalty"),
        ({"params": {"custom_params": {"a": [math.nan]}}}, "sampling_params.custom_params"),
        ({"params": {"logit_bias": {"x": 1.0}}}, "sampling_params.logit_bias"),
        ({"params": {"logit_bias": {"-1": 1.0}}}, "sampling_params.logit_bias"),
        ({"params": {"stop_token_ids": [1000]}}, "sampling_params.stop_token_ids"),
        ({"params": {"temperature": -1.0}}, "sampling_params.temperature"),
        ({"params": {"top_p": 1.5}}, "sampling_params.top_p"),
        ({"params": {"min_p": 1.5}}, "sampling_params.min_p"),
        ({"params": {"top_k": -2}}, "sampling_params.top_k"),
        ({"params": {"frequency_penalty": 2.5}}, "sampling_params.frequency_penalty"),
        ({"params": {"presence_penalty": -2.5}}, "sampling_params.presence_penalty"),
        ({"params": {"repetition_penalty": 2.5}}, "sampling_params.repetition_penalty"),
        ({"params": {"min_new_tokens": 9}}, "sampling_params.min_new_tokens"),
        ({"params": {"stop": ["x"] * 33}}, "sampling_params.stop"),
        ({"params": {"stop": ["x" * 9000, "y" * 9000]}}, "sampling_params.stop"),
        (
            {"params": {"custom_params": {"__sglang_reasoning_end_token_ids": [99999]}}},
            "sampling_params.custom_params",
        ),
        ({"return_logprob": True, "token_ids_logprob": [1000]}, "token_ids_logprob"),
        ({"return_logprob": True, "token_ids_logprob": [5] * 1001}, "token_ids_logprob"),
        ({"return_logprob": True, "top_logprobs_num": 1001}, "top_logprobs_num"),
        ({"return_logprob": True, "logprob_start_len": 4}, "logprob_start_len"),
        ({"data_parallel_rank": 1}, "data_parallel_rank"),
        ({"disaggregated_params": KV}, "disaggregated_params"),
        ({"custom_logit_processor": "x"}, "custom_logit_processor"),
        ({"return_hidden_states": True}, "return_hidden_states"),
        ({"input_embeds": [0.5]}, "input_embeds"),
        ({"mm_inputs": pixels()}, "mm_inputs"),
    ],
)
async def test_rows_19_and_20_what_would_end_the_scheduler_is_refused(
    fields: Any, field: str
) -> None:
    """§11-19 and 20, and what kills the published one: refused by name, nothing is sent."""
    async with served_sglang(limits=LIMITS) as server:
        history = await server.generate(request(**fields))
        assert history.code is CODE.INVALID_ARGUMENT
        assert re.search(f"^{field}", history.details), history.details
        assert server.scheduler.received == []
        await server.idle()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"custom_logit_processor": "no json"}, "custom_logit_processor"),
        ({"custom_logit_processor": '{"callable": "xyz"}'}, "custom_logit_processor"),
        ({"custom_logit_processor": '{"callable": "80049300"}'}, "custom_logit_processor"),
        ({"custom_logit_processor": NO_PROCESSOR}, "custom_logit_processor"),
        ({"input_embeds": [math.nan, 1.0]}, "input_embeds"),
        ({"input_embeds": [0.5, 1.0, 1.5]}, "input_embeds"),
        ({"mm_inputs": pixels(modalities=["image", "video"])}, "mm_inputs.modalities"),
        ({"mm_inputs": pixels(modalities=["smell"])}, "mm_inputs.modalities"),
        ({"mm_inputs": pixels(mm_placeholders=[{"offset": 2, "length": 2}])}, "mm_inputs.mm_pl"),
        (
            {"mm_inputs": pixels(pixel_values={"data": b"1", "shape": [1], "dtype": "float32"})},
            "mm_inputs.pixel_values",
        ),
        (
            {"mm_inputs": pixels(pixel_values={"data": b"1", "shape": [1], "dtype": "object"})},
            "mm_inputs.pixel_values.dtype",
        ),
    ],
)
async def test_what_is_not_what_it_says_is_refused(fields: Any, field: str) -> None:
    async with served_sglang(limits=ALL) as server:
        history = await server.generate(request(**fields))
        assert history.code is CODE.INVALID_ARGUMENT
        assert history.details.startswith(field)
        assert server.scheduler.received == []


@pytest.mark.parametrize("params", [{}, {"bootstrap_room": 3}])
@pytest.mark.parametrize("role", ["prefill", "decode"])
async def test_a_pd_request_without_its_peer_is_refused(role: str, params: Any) -> None:
    """It would end the scheduler (`None.startswith`)."""
    async with served_sglang(limits=Limits(role=role)) as server:
        more = {"disaggregated_params": params} if params else {}
        history = await server.generate(request(**more))
        assert history.code is CODE.INVALID_ARGUMENT
        assert history.details.startswith("disaggregated_params")


@pytest.mark.parametrize("kind", ["image_data", "image_urls", "video_urls", "audio_data"])
async def test_media_that_would_be_answered_as_text_are_refused(kind: str) -> None:
    async with served_sglang(limits=ALL) as server:
        value = [b"x"] if kind.endswith("data") else ["x"]
        history = await server.generate(request(mm_inputs={kind: value}))
        assert history.code is CODE.UNIMPLEMENTED
        assert server.scheduler.received == []


@pytest.mark.parametrize("params", [{"stop": ["x"]}, {"min_new_tokens": 1}])
async def test_without_a_tokenizer_what_needs_one_is_refused(params: Any) -> None:
    async with served_sglang(skip_tokenizer_init=True, limits=Limits(tokenizer=False)) as server:
        history = await server.generate(request(params=params))
        assert history.code is CODE.UNIMPLEMENTED


# Embed.

EMBEDDING = ModelFacts("/m", "m", is_generation=False, max_context_length=64, vocab_size=1000)


def embed(**fields: Any) -> Any:
    given = {"tokenized": {"input_ids": fields.pop("ids", [5, 6, 7])}, **fields}
    return pb.EmbedRequest(request_id="e", **given)


async def test_an_embed_arrives() -> None:
    async with served_sglang(facts=EMBEDDING, ranks=2) as server:
        call = server.stub.Embed(
            embed(token_type_ids=[0, 0, 1], data_parallel_rank=1, is_cross_encoder=True)
        )
        (sent,) = await server.sent()
        assert (list(sent.input_ids), sent.token_type_ids) == ([5, 6, 7], [0, 0, 1])
        assert (sent.routed_dp_rank, sent.sampling_params.max_new_tokens) == (1, 0)
        call.cancel()


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"ids": []}, "tokenized.input_ids"),
        ({"ids": [5] * 65}, "tokenized.input_ids"),
        ({"ids": [5] * 60}, "tokenized.input_ids"),
        ({"ids": [1000]}, "tokenized.input_ids"),
        ({"token_type_ids": [1]}, "token_type_ids"),
        ({"data_parallel_rank": 2}, "data_parallel_rank"),
    ],
)
async def test_an_embed_that_would_end_the_scheduler_is_refused(fields: Any, field: str) -> None:
    async with served_sglang(facts=EMBEDDING, limits=Limits(max_prompt_tokens=60)) as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Embed(embed(**fields))
        assert caught.value.code() is CODE.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(field)
        assert server.scheduler.received == []
        await server.idle()


@pytest.mark.parametrize("ids", [[5, 6, 7], [5] * 5000])
async def test_a_misdirected_embed_is_the_caller_s_mistake(ids: list[int]) -> None:
    """An over-long one too; it would end the scheduler."""
    async with served_sglang() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.Embed(embed(ids=ids))
        assert caught.value.code() is CODE.INVALID_ARGUMENT
        assert (caught.value.details() or "").startswith(
            ("EmbedRequest: ", "tokenized.input_ids: ")
        )
        assert server.scheduler.received == []
        await server.idle()


@pytest.mark.parametrize("fields", [{}, {"params": {"n": 2, "regex": "a"}}])
async def test_a_misdirected_generate_is_the_caller_s_mistake(fields: Any) -> None:
    async with served_sglang(facts=EMBEDDING) as server:
        history = await server.generate(request(**fields))
        assert history.code is CODE.INVALID_ARGUMENT
        assert re.search("^GenerateRequest: .*--is-embedding.*send Embed", history.details)
        assert server.scheduler.received == []
        await server.idle()


async def test_embeddings_for_a_model_that_is_not_bfloat16_are_refused() -> None:
    """SGLang makes bfloat16 of them and its first layer ends the scheduler."""
    facts = ModelFacts("/m", "m", max_context_length=4096, vocab_size=1000, dtype="torch.float16")
    async with served_sglang(limits=ALL, facts=facts) as server:
        history = await server.generate(request(input_embeds=[0.5, 1.0]))
        assert history.code is CODE.INVALID_ARGUMENT
        assert "bfloat16" in history.details


async def test_ids_and_embeddings_are_never_computed_together() -> None:
    """A prefill batch of both ends the scheduler."""
    async with served_sglang(limits=ALL) as server:
        calls = []

        def waiting(count: int) -> Callable[[], bool]:
            return lambda: server.engine.statistics()["waiting_for_turn"] == count

        kinds: list[dict[str, Any]] = [{}, {"input_embeds": [0.5, 1.0]}, {}]
        for at, fields in enumerate(kinds):
            asked = request(f"r-{at}", **fields)
            calls.append(asyncio.ensure_future(server.generate(asked)))
            await server.sent()
            await until(waiting(at))
        for at, embeds in enumerate((False, True, False)):
            sent = (await server.sent(at + 1))[at]
            await asyncio.sleep(0.02)
            assert len(server.scheduler.received) == at + 1
            assert (sent.input_embeds is not None) == embeds
            await server.scheduler.say(batch(Row(sent.rid, [9], completion_tokens=1)))
        for sent in server.scheduler.received:
            await server.scheduler.say(batch(Row(sent.rid, [8], stop(), completion_tokens=2)))
        assert [(await call).code for call in calls] == [CODE.OK] * 3
        await server.idle()
