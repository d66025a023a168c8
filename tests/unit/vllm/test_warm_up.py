"""What of vLLM's configuration decides over its warm-up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from smg_grpc_servicer.testing import FakeEngine
from smg_grpc_servicer.vllm.warm_up import in_process, over_grpc, plan_of
from smg_grpc_servicer.warmup.plan import NOTHING, ONE, Plan
from smg_grpc_servicer.warmup.setting import WarmUpBudget
from tests.support.vllm_config import kv_config, vllm_config

GPU = {"device_config__device_type": "cuda", "compilation_config__cudagraph_capture_sizes": [1, 6]}


def prompts(plan: Plan) -> set[int]:
    return {shot.prompt_tokens for step in (*plan.grid, *plan.rest) for shot in step.shots}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, "on a CPU there is no more to make"),
        (GPU | {"model_config__enforce_eager": True}, "--enforce-eager leaves no more to make"),
    ],
)
def test_an_engine_that_makes_nothing_gets_one_request(
    changes: dict[str, Any], reason: str
) -> None:
    """Weak point 9: 300 s of not being ready at each restart, for an engine that is warm."""
    plan = plan_of(vllm_config(**changes), "auto", [0])
    assert (plan.steps, plan.about) == (1, f"one request, {reason}")
    assert plan_of(vllm_config(**changes), "fast", [0]).steps > 10
    assert plan_of(vllm_config(**changes), "off", [0]) == NOTHING


def test_a_gpu_with_graphs_gets_all_of_it() -> None:
    plan = plan_of(vllm_config(**GPU), "auto", [0])
    assert plan.about == "full"
    assert max(prompts(plan)) == 64, "what one step computes"
    batches = [step for step in (*plan.grid, *plan.rest) if step.name.startswith("decode")]
    assert [len(step.shots) for step in batches] == [8, 8], "as many as run at once"
    assert {shot.rank for step in plan.grid for shot in step.shots} == {None}


def test_several_ranks_are_warmed_each() -> None:
    plan = plan_of(vllm_config(**GPU), "auto", [2, 3])
    for step in plan.grid:
        assert {shot.rank for shot in step.shots} == {2, 3}


class Answers(vllm_engine_pb2_grpc.VllmEngineServicer):
    """A server that answers at once."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        yield vllm_engine_pb2.GenerateResponse(
            complete=vllm_engine_pb2.GenerateComplete(finish_reason="length")
        )


async def test_a_proxy_of_the_environment_is_not_asked(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It could not reach this machine's loopback: the budget would pass with nothing answered."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    server = grpc.aio.server()
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Answers(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    caplog.set_level("INFO", logger="smg_grpc_servicer")
    try:
        await over_grpc(Plan("one request", 1000, ONE), 10, f"127.0.0.1:{port}")
    finally:
        await server.stop(0)
    assert "1 answered, 0 failed" in caplog.text


def test_beside_a_kv_connector_nothing_is_sent_by_itself() -> None:
    """Some read the peer's address in every request's id, and end their engine over ours."""
    config = vllm_config(kv_transfer_config=kv_config("P2pNcclConnector"))
    assert plan_of(config, "auto", [0]) == NOTHING
    assert plan_of(config, "fast", [0]).steps > 10


async def test_a_model_for_pooling_generates_nothing() -> None:
    engine = FakeEngine()
    engine.facts = replace(engine.facts, is_generation=False)
    await in_process(WarmUpBudget("full", 1), None, engine)
    assert engine.submitted == []
