"""Which requests a connector would have to hear of when they fail."""

from __future__ import annotations

from typing import Any

import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.vllm.handover import Handover, opened, taken


def request(**fields: Any) -> pb.GenerateRequest:
    return pb.GenerateRequest(request_id="r", **fields)


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"kv_transfer_params_json": '{"do_remote_decode": true}'},
        {"kv_transfer_params_json": '{"do_remote_prefill": false}'},
        {"kv_transfer_params_json": "no json"},
        {"kv_transfer_params": {"remote_host": "h", "remote_port": 1}},
    ],
)
def test_only_a_decode_request_has_blocks_waiting(fields: dict[str, Any]) -> None:
    assert Handover.of(request(**fields)) is None


def test_a_handover_knows_its_rank_and_zero_is_one() -> None:
    text = '{"do_remote_prefill": true, "remote_block_ids": [[1, 2]], "x": null}'
    pinned = Handover.of(request(kv_transfer_params_json=text, data_parallel_rank=0))
    assert pinned is not None
    assert pinned.rank == 0
    assert pinned.params["remote_block_ids"] == [[1, 2]]
    free = Handover.of(request(kv_transfer_params_json=text))
    assert free is not None
    assert free.rank is None


def test_taken_is_about_the_handover_at_hand() -> None:
    one, other = Handover("a", {}, None), Handover("b", {}, None)
    with opened(one):
        with opened(other):
            taken()
        assert (one.taken, other.taken) == (False, True)
    taken()
    assert not one.taken
