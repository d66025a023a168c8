"""What the wires put into an answer, value by value."""

from __future__ import annotations

from typing import Any

import pytest

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.types import (
    Delta,
    Finish,
    GenerateSpec,
    KvTransfer,
    LogprobRows,
    LogprobSpec,
    PromptLogprobs,
)
from smg_grpc_servicer.core.wire import Choice, Wire
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


def end(engine: str, finish: Finish, *deltas: Delta, spec: GenerateSpec | None = None) -> Any:
    choice = Choice(0, prompt_tokens=3, stream=False)
    for delta in deltas:
        choice.add(delta)
    return WIRES[engine].complete(spec or GenerateSpec("r"), choice, finish).complete


@pytest.mark.parametrize(
    ("handed", "json_out", "address"),
    [
        (KvTransfer(params_json='{"a":1}'), '{"a":1}', None),
        (
            KvTransfer(params_json='{"remote_host":"h","remote_port":80}'),
            '{"remote_host":"h","remote_port":80}',
            ("h", 80),
        ),
        (KvTransfer(params_json='{"remote_host":"h","remote_port":true}'), None, None),
        (KvTransfer(host="h", port=80), "", ("h", 80)),
        (KvTransfer(params_json='{"a":Infinity}'), "", None),
    ],
)
def test_vllm_hands_over_what_decode_needs(
    handed: KvTransfer, json_out: str | None, address: tuple[str, int] | None
) -> None:
    """Never a text that a strict JSON reader would refuse, never half an address."""
    got = end("vllm", Finish("length", kv_transfer=handed))
    assert got.kv_transfer_params_json == (handed.params_json if json_out is None else json_out)
    sent = got.kv_transfer_params
    assert ((sent.remote_host, sent.remote_port) if address else None) == address
    assert got.HasField("kv_transfer_params") == (address is not None)


@pytest.mark.parametrize("engine", ALL)
@pytest.mark.parametrize(
    ("matched", "member"), [(0, "matched_token_id"), ("", "matched_stop_str"), (None, None)]
)
def test_what_matched_is_told_by_its_kind(
    engine: str, matched: int | str | None, member: str | None
) -> None:
    got = end(engine, Finish("stop", matched))
    assert got.WhichOneof("matched_stop") == member


@pytest.mark.parametrize("engine", ALL)
def test_a_negative_count_of_the_engine_does_not_lose_the_answer(engine: str) -> None:
    got = end(engine, Finish("stop", spec_accepted_tokens=-1, spec_draft_tokens=2))
    assert (got.spec_accepted_tokens, got.spec_draft_tokens) == (0, 2)


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_first_prompt_token_has_a_row_without_a_value(engine: str) -> None:
    rows = PromptLogprobs([5, 6], [None, -0.5], [[], [6]], [[], [-0.5]])
    got = end(engine, Finish("length"), Delta(prompt_logprobs=rows)).input_logprobs
    assert [row.HasField("value") for row in got.token_logprobs] == [False, True]
    assert list(got.token_ids) == [5, 6]
    assert [list(row.token_ids) for row in got.top_logprobs] == [[], [6]]


def test_sglang_names_the_chosen_ids_in_each_row() -> None:
    spec = GenerateSpec("r", logprobs=LogprobSpec(0, token_ids=(9, 8)))
    rows = LogprobRows([-0.5, -0.5], [[], []], [[], []], [[-1.0, -2.0], [-3.0, -4.0]])
    got = end("sglang", Finish("length"), Delta(token_ids=[1, 2], logprobs=rows), spec=spec)
    chosen = got.output_logprobs.token_ids_logprobs
    assert [(list(r.token_ids), list(r.values)) for r in chosen] == [
        ([9, 8], [-1.0, -2.0]),
        ([9, 8], [-3.0, -4.0]),
    ]


@pytest.mark.parametrize("engine", SGLANG_LIKE)
def test_an_abort_of_an_unknown_id_is_a_success(engine: str) -> None:
    wire = WIRES[engine]
    assert wire.abort_response([]).success
    assert wire.abort_response([]).message != wire.abort_response(["r"]).message


# Loads.


@pytest.mark.parametrize("engine", ALL)
def test_loads_of_one_rank_or_of_none(engine: str) -> None:
    pb, wire = DIALECTS[engine].pb, WIRES[engine]
    loads = [Load(rank=rank, running_requests=rank) for rank in (0, 1)]

    def ranks(**fields: Any) -> list[int]:
        answer = wire.loads_response(pb.GetLoadsRequest(**fields), loads, "")
        assert answer.dp_rank_count == len(answer.loads)
        return [load.dp_rank for load in answer.loads]

    assert ranks() == [0, 1]
    assert ranks(dp_rank=0) == [0]
    assert ranks(dp_rank=7) == []
    assert ranks(include=["core", "disagg", "queues", "memory"]) == [0, 1]
    with pytest.raises(InvalidArgument, match="dp_rank"):
        ranks(dp_rank=-1)


def test_sglang_refuses_a_section_that_does_not_exist() -> None:
    request = DIALECTS["sglang"].pb.GetLoadsRequest(include=["core", "weather"])
    with pytest.raises(InvalidArgument, match="'weather'"):
        WIRES["sglang"].loads_response(request, [], "")


@pytest.mark.parametrize("engine", SGLANG_LIKE)
def test_sums_and_means_run_over_the_ranks_that_know(engine: str) -> None:
    """A rank that says nothing does not halve the mean."""
    loads = [
        Load(rank=0, running_requests=2, waiting_requests=3, token_usage=0.5, gen_throughput=10.0),
        Load(rank=1, running_requests=1),
        Load(rank=2, running_requests=1, waiting_requests=0, token_usage=0.2, gen_throughput=5.0),
    ]
    answer = WIRES[engine].loads_response(DIALECTS[engine].pb.GetLoadsRequest(), loads, "")
    total = answer.aggregate
    assert (total.total_running_reqs, total.total_waiting_reqs, total.total_reqs) == (4, 3, 6)
    assert (total.avg_token_usage, total.avg_throughput) == (0.35, 7.5)
    nobody = WIRES[engine].loads_response(DIALECTS[engine].pb.GetLoadsRequest(), [], "")
    assert not nobody.HasField("aggregate")
