"""What the wires read out of a request, value by value."""

from __future__ import annotations

import math
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.core.errors import InvalidArgument, Unsupported
from smg_grpc_servicer.core.types import (
    Constraint,
    Feature,
    GenerateSpec,
    KvTransfer,
    LogprobSpec,
)
from smg_grpc_servicer.core.wire import Wire
from smg_grpc_servicer.sglang.wire import SglangWire
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.tokenspeed.wire import TokenSpeedWire
from smg_grpc_servicer.vllm.wire import VllmWire

WIRES: dict[str, Wire] = {
    "vllm": VllmWire(),
    "sglang": SglangWire(),
    "tokenspeed": TokenSpeedWire(),
}
ALL = sorted(WIRES)
SGLANG_LIKE = ["sglang", "tokenspeed"]


def ask(engine: str, **fields: Any) -> GenerateSpec:
    """The spec of a request with these fields; `sampling_params` as a dict."""
    pb = DIALECTS[engine].pb
    tokenized = pb.TokenizedInput(input_ids=[5, 6, 7])
    return WIRES[engine].generate_spec(
        pb.GenerateRequest(**{"request_id": "r", "tokenized": tokenized, **fields})
    )


def sampling(engine: str, **fields: Any) -> Any:
    return ask(engine, sampling_params=fields).sampling


# Off, unset and zero.


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
@pytest.mark.parametrize("zero", [0.0, -0.0])
def test_a_plain_zero_is_off_whatever_its_sign(engine: str, zero: float) -> None:
    """protobuf sends the negative one and lists it as a field that is set."""
    got = sampling(engine, top_p=zero, min_p=zero, repetition_penalty=zero)
    assert (got.top_p, got.min_p, got.repetition_penalty) == (None,) * 3


@pytest.mark.parametrize(
    ("engine", "temperature"), [("vllm", None), ("sglang", 0.0), ("tokenspeed", None)]
)
def test_nothing_said_is_everything_off(engine: str, temperature: float | None) -> None:
    """SGLang's plain `temperature` is greedy when it is left out: what its servicers always did."""
    got = sampling(engine)
    assert got.temperature == temperature
    assert (got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (None,) * 4
    assert (got.frequency_penalty, got.presence_penalty) == (None, None)
    assert (got.max_tokens, got.min_tokens, got.seed, got.n) == (None, None, None, 1)
    assert (got.stop, got.stop_token_ids, got.logit_bias, got.constraint) == ((), (), {}, None)
    assert ask(engine).logprobs == LogprobSpec()
    assert ask(engine).needs == frozenset()


@pytest.mark.parametrize("engine", ALL)
def test_a_temperature_of_zero_is_greedy(engine: str) -> None:
    assert sampling(engine, temperature=0.0).temperature == 0.0


def test_where_presence_is_told_zero_is_a_value() -> None:
    got = sampling("tokenspeed", top_p=0.0, top_k=0, min_p=0.0, repetition_penalty=0.0)
    assert (got.top_p, got.top_k, got.min_p, got.repetition_penalty) == (0.0, 0, 0.0, 0.0)
    assert sampling("tokenspeed", sampling_seed=0).seed == 0
    assert sampling("vllm", seed=0).seed == 0


@pytest.mark.parametrize("engine", SGLANG_LIKE)
def test_top_k_of_minus_one_is_off(engine: str) -> None:
    assert sampling(engine, top_k=-1).top_k is None
    assert sampling(engine, top_k=-2).top_k == -2, "left for validation to refuse"


@pytest.mark.parametrize("engine", ALL)
def test_rank_zero_is_a_pin_and_no_rank_is_none(engine: str) -> None:
    assert ask(engine).rank is None
    assert ask(engine, data_parallel_rank=0).rank == 0
    assert ask(engine, data_parallel_rank=0).needs == {Feature.RANK}


def test_an_embedding_cannot_be_pinned_to_rank_zero() -> None:
    """The field is plain there: zero is any rank."""
    pb, wire = DIALECTS["sglang"].pb, WIRES["sglang"]
    tokenized = pb.TokenizedInput(input_ids=[5])
    any_rank = wire.embed_spec(pb.EmbedRequest(tokenized=tokenized))
    pinned = wire.embed_spec(pb.EmbedRequest(tokenized=tokenized, data_parallel_rank=1))
    assert (any_rank.rank, any_rank.needs) == (None, frozenset())
    assert (pinned.rank, pinned.needs) == (1, frozenset({Feature.RANK}))
    with pytest.raises(InvalidArgument, match="data_parallel_rank"):
        wire.embed_spec(pb.EmbedRequest(tokenized=tokenized, data_parallel_rank=-1))


# What an engine must have.


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize(
    ("fields", "feature"),
    [
        ({"n": 2}, Feature.CHOICES),
        ({"stop": ["end"]}, Feature.STOP_STRINGS),
        ({"regex": "a+"}, Feature.CONSTRAINT),
    ],
)
def test_needs_follow_from_what_is_asked(
    engine: str, fields: dict[str, Any], feature: Feature
) -> None:
    assert ask(engine, sampling_params=fields).needs == {feature}


def test_needs_of_each_proto_own_wishes() -> None:
    assert ask("vllm", tokenized=None, text="hi").needs == {Feature.TEXT_INPUT}
    assert ask("vllm", sampling_params={"min_tokens": 1}).needs == {Feature.MIN_TOKENS}
    assert ask("vllm", sampling_params={"prompt_logprobs": 0}).needs == {Feature.PROMPT_LOGPROBS}
    assert ask("sglang", lora_id="l").needs == {Feature.LORA}
    everything = ask("sglang", return_logprob=True, token_ids_logprob=[1])
    assert everything.needs == {Feature.PROMPT_LOGPROBS, Feature.TOKEN_LOGPROBS}


@pytest.mark.parametrize("engine", ALL)
def test_an_empty_message_asks_for_nothing(engine: str) -> None:
    pb = DIALECTS[engine].pb
    assert ask(engine, mm_inputs=pb.MultimodalInputs()) == ask(engine)
    if engine != "vllm":
        assert ask(engine, sampling_params={"custom_params": {}}) == ask(engine)


# Constraints.


@pytest.mark.parametrize(
    ("engine", "field", "kind"),
    [(e, field, field) for e in ALL for field in ("json_schema", "regex", "structural_tag")]
    + [("vllm", "grammar", "grammar")]
    + [(e, "ebnf_grammar", "grammar") for e in SGLANG_LIKE],
)
def test_constraints_go_by_one_name_in_core(engine: str, field: str, kind: str) -> None:
    assert sampling(engine, **{field: "x"}).constraint == Constraint(kind, "x")
    assert sampling(engine, **{field: ""}).constraint is None


def test_vllm_constraints_of_other_shapes() -> None:
    assert sampling("vllm", json_object=True).constraint == Constraint("json_object", "")
    assert sampling("vllm", json_object=False).constraint is None
    assert sampling("vllm", choice={"choices": ["a", "b"]}).constraint == Constraint(
        "choice", ("a", "b")
    )
    assert sampling("vllm", choice={}).constraint is None
    early = sampling("vllm", regex="a", grammar_from_first_token=True).constraint
    assert early == Constraint("regex", "a", from_first_token=True)


# Logprobs.


@pytest.mark.parametrize("count", [0, 5, -1])
def test_vllm_counts_logprobs_from_zero(count: int) -> None:
    got = ask("vllm", sampling_params={"logprobs": count, "prompt_logprobs": count}).logprobs
    assert got == LogprobSpec(output=count, prompt=count)


@pytest.mark.parametrize("engine", SGLANG_LIKE)
def test_without_return_logprob_the_other_options_mean_nothing(engine: str) -> None:
    got = ask(engine, top_logprobs_num=3, logprob_start_len=0, token_ids_logprob=[1])
    assert got.logprobs == LogprobSpec()
    assert got.needs == frozenset()


@pytest.mark.parametrize("engine", SGLANG_LIKE)
def test_a_start_of_minus_one_asks_for_output_rows_only(engine: str) -> None:
    got = ask(engine, return_logprob=True, top_logprobs_num=2, logprob_start_len=-1)
    assert got.logprobs == LogprobSpec(output=2)


def test_a_start_left_out_is_the_whole_prompt_for_sglang_and_none_for_tokenspeed() -> None:
    assert ask("sglang", return_logprob=True).logprobs == LogprobSpec(output=0, prompt=0)
    assert ask("tokenspeed", return_logprob=True).logprobs == LogprobSpec(output=0)


def test_sglang_rows_from_a_position_on() -> None:
    got = ask(
        "sglang",
        return_logprob=True,
        top_logprobs_num=2,
        logprob_start_len=1,
        token_ids_logprob=[9, 8],
    )
    assert got.logprobs == LogprobSpec(2, 2, prompt_start=1, token_ids=(9, 8))


# Refused.


@pytest.mark.parametrize("engine", SGLANG_LIKE)
@pytest.mark.parametrize("key", ["seven", "", "1.0", "1_0", " 1", "--1", "٣"])
def test_a_bias_key_that_is_no_token_id_is_named(engine: str, key: str) -> None:
    with pytest.raises(InvalidArgument, match=r"sampling_params\.logit_bias") as caught:
        sampling(engine, logit_bias={key: 1.0})
    assert repr(key) in str(caught.value)


@pytest.mark.parametrize("engine", SGLANG_LIKE)
def test_a_bias_key_that_is_an_integer_is_taken(engine: str) -> None:
    assert sampling(engine, logit_bias={"12": 1.0, "-1": 2.0}).logit_bias == {12: 1.0, -1: 2.0}


@pytest.mark.parametrize(
    ("engine", "fields", "named"),
    [
        ("vllm", {"tokenized": None}, "input"),
        ("sglang", {"tokenized": None}, "tokenized"),
        ("tokenspeed", {"tokenized": None}, "tokenized"),
        ("sglang", {"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ("tokenspeed", {"return_logprob": True, "top_logprobs_num": -1}, "top_logprobs_num"),
        ("sglang", {"return_logprob": True, "logprob_start_len": -2}, "logprob_start_len"),
        ("sglang", {"return_logprob": True, "logprob_start_len": 4}, "logprob_start_len"),
        ("sglang", {"sampling_params": {"stream_interval": 0}}, "stream_interval"),
        ("sglang", {"disaggregated_params": {"bootstrap_port": 65536}}, "bootstrap_port"),
        ("sglang", {"disaggregated_params": {"bootstrap_room": -1}}, "bootstrap_room"),
        ("tokenspeed", {"kv_bootstrap_info": {"bootstrap_port": -1}}, "bootstrap_port"),
        ("vllm", {"kv_transfer_params": {"remote_port": 80}}, "kv_transfer_params.remote_host"),
        ("vllm", {"kv_transfer_params": {"remote_host": "h"}}, "kv_transfer_params.remote_port"),
        ("vllm", {"kv_transfer_params_json": ""}, "kv_transfer_params_json"),
        ("vllm", {"kv_transfer_params_json": "[1]"}, "kv_transfer_params_json"),
        ("vllm", {"kv_transfer_params_json": '{"a":NaN}'}, "kv_transfer_params_json"),
        ("vllm", {"kv_transfer_params_json": '{"a":1e400}'}, "kv_transfer_params_json"),
        ("vllm", {"kv_transfer_params_json": "[" * 9000}, "kv_transfer_params_json"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name(
    engine: str, fields: dict[str, Any], named: str
) -> None:
    with pytest.raises(InvalidArgument) as caught:
        ask(engine, **fields)
    assert named in caught.value.field


def test_tokenspeed_refuses_rows_its_answers_have_no_room_for() -> None:
    """Nothing asked for is dropped without a word."""
    with pytest.raises(Unsupported, match="prompt logprobs"):
        ask("tokenspeed", return_logprob=True, logprob_start_len=0)
    with pytest.raises(Unsupported, match="chosen token ids"):
        ask("tokenspeed", return_logprob=True, token_ids_logprob=[1])


# KV transfer.


def test_vllm_takes_json_before_the_typed_address() -> None:
    address = {"remote_host": "h", "remote_port": 80}
    assert ask("vllm", kv_transfer_params=address).kv_transfer == KvTransfer(host="h", port=80)
    text = '{"do_remote_decode": true}'
    both = ask("vllm", kv_transfer_params=address, kv_transfer_params_json=text)
    assert both.kv_transfer == KvTransfer(params_json=text)
    assert both.needs == {Feature.KV_TRANSFER}
    assert ask("vllm", kv_transfer_params_json="{}").kv_transfer is None


@pytest.mark.parametrize(
    ("engine", "field", "room"),
    [("sglang", "disaggregated_params", 0), ("tokenspeed", "kv_bootstrap_info", 2**62)],
)
def test_a_bootstrap_address_keeps_its_room(engine: str, field: str, room: int) -> None:
    got = ask(engine, **{field: {"bootstrap_host": "h", "bootstrap_room": room}})
    assert got.kv_transfer == KvTransfer(host="h", port=None, room=room)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
@pytest.mark.parametrize("engine", ALL)
def test_a_flush_waits_a_finite_time(engine: str, seconds: float) -> None:
    """NaN is less than nothing and more than nothing: it used to reach the loop's timers."""
    with pytest.raises(InvalidArgument, match="timeout_s: must be a finite number"):
        WIRES[engine].flush_timeout(common_pb2.FlushCacheRequest(timeout_s=seconds))
    assert WIRES[engine].flush_timeout(common_pb2.FlushCacheRequest(timeout_s=2)) == 2
    assert WIRES[engine].flush_timeout(common_pb2.FlushCacheRequest()) is None
