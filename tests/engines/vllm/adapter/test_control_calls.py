"""The calls around a server, over vLLM's own objects."""

from __future__ import annotations

import asyncio
from time import monotonic, time
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.vllm import adapter
from smg_grpc_servicer.vllm.servicer import VllmEngineServicer
from tests.support.stub_async_llm import StubAsyncLLM
from tests.support.vllm_config import kv_config, vllm_config
from tests.support.vllm_served import served_vllm
from tests.support.wait import until

CODE = grpc.StatusCode


def slow() -> object:
    return asyncio.sleep(0.001)


async def test_an_embedding_is_the_models_vector() -> None:
    config = vllm_config(model_config__runner_type="pooling")
    async with served_vllm(StubAsyncLLM(config)) as server:
        request = pb.EmbedRequest(request_id="e", tokenized={"input_ids": [4, 5, 6]})
        answer = await server.stub.Embed(request)
        assert list(answer.embedding) == [4.0, 5.0, 6.0]
        assert (answer.prompt_tokens, answer.embedding_dim) == (3, 3)
        assert not (await server.stub.GetModelInfo(pb.GetModelInfoRequest())).is_generation


async def test_an_embedding_belongs_to_its_callers_trace(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weak point 20."""
    parent = "00-" + "1" * 32 + "-" + "2" * 16 + "-01"
    config = vllm_config(
        model_config__runner_type="pooling", observability_config__otlp_traces_endpoint="http://x"
    )
    llm = StubAsyncLLM(config)
    told: list[Any] = []
    encode = llm.encode

    def watched(*args: Any, **options: Any) -> Any:
        told.append(options.get("trace_headers"))
        return encode(*args, **options)

    monkeypatch.setattr(llm, "encode", watched)
    async with served_vllm(llm) as server:
        request = pb.EmbedRequest(request_id="e", tokenized={"input_ids": [4, 5, 6]})
        await server.stub.Embed(request, metadata=[("traceparent", parent)])
    assert told == [{"traceparent": parent}]


async def test_a_generating_model_has_no_embeddings() -> None:
    async with served_vllm(StubAsyncLLM()) as server:
        request = pb.EmbedRequest(request_id="e", tokenized={"input_ids": [4]})
        with pytest.raises(grpc.aio.AioRpcError, match="vLLM does not support embed") as refused:
            await server.stub.Embed(request)
        assert refused.value.code() is CODE.UNIMPLEMENTED


async def test_the_server_tells_all_there_is_to_know() -> None:
    """Weak point 6: uptime, requests, pause and kind were left at zero."""
    config = vllm_config(
        kv_transfer_config=kv_config(),
        structured_outputs_config=SimpleNamespace(
            reasoning_parser="qwen3", enable_in_reasoning=False
        ),
    )
    llm = StubAsyncLLM(config, step=slow)
    async with served_vllm(llm) as server:
        call = server.stub.Generate(server.request(max_tokens=100_000))
        await call.read()
        llm.paused = True
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.server_type == "vllm-grpc"
        assert info.active_requests == 1
        assert info.is_paused
        assert info.uptime_seconds > 0
        assert (info.kv_connector, info.kv_role, info.kv_engine_id) == (
            "NixlConnector", "kv_both", "e-1",
        )  # fmt: skip
        assert (info.block_size, info.max_num_seqs, info.data_parallel_size) == (16, 8, 1)
        assert info.engine_reasoning_parser == "qwen3"
        assert info.constrained_decoding_start == "after_reasoning"
        assert info.multimodal_encoder_dtype == "bfloat16"
        llm.paused = False
        assert not (await server.stub.GetServerInfo(pb.GetServerInfoRequest())).is_paused
        call.cancel()


async def test_uptime_counts_from_the_launchers_start() -> None:
    """Three arguments, as vLLM 0.33 builds it."""
    llm = StubAsyncLLM()
    servicer = VllmEngineServicer(llm, time() - 100, None)
    context: Any = None  # an answer needs none
    info = await servicer.GetServerInfo(pb.GetServerInfoRequest(), context)
    assert 100 <= info.uptime_seconds < 160
    await servicer.close()
    llm.shutdown()


async def test_a_busy_engine_does_not_hold_up_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    llm = StubAsyncLLM()
    monkeypatch.setattr(adapter, "PAUSE_SECONDS", 0.05)
    monkeypatch.setattr(llm, "is_paused", lambda: asyncio.sleep(60))
    async with served_vllm(llm) as server:
        start = monotonic()
        await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert monotonic() - start < 5


@pytest.mark.parametrize("stats", [True, False])
async def test_loads_count_what_runs_with_and_without_engine_statistics(stats: bool) -> None:
    """T9 and weak point 15: with --disable-log-stats the worker read as idle."""
    async with served_vllm(StubAsyncLLM(step=slow, stats=stats)) as server:
        calls = [server.stub.Generate(server.request(f"r-{i}", max_tokens=100_000))
                 for i in range(3)]  # fmt: skip
        for call in calls:
            await call.read()
        answer = await server.stub.GetLoads(pb.GetLoadsRequest())
        (load,) = answer.loads
        assert (load.dp_rank, load.num_running_reqs, load.num_total_reqs) == (0, 3, 3)
        assert load.max_running_requests == 8
        assert load.max_total_num_tokens == 1600
        assert load.num_used_tokens == (400 if stats else 0)
        assert answer.version != ""
        for call in calls:
            call.cancel()


async def test_loads_have_a_row_for_each_rank_here_under_its_global_id() -> None:
    llm = StubAsyncLLM(ranks=(4, 5), stats=False, step=slow)
    async with served_vllm(llm) as server:
        request = server.request("r", max_tokens=100_000)
        request.data_parallel_rank = 5
        call = server.stub.Generate(request)
        await call.read()
        loads = (await server.stub.GetLoads(pb.GetLoadsRequest())).loads
        assert [(load.dp_rank, load.num_running_reqs) for load in loads] == [(4, 0), (5, 1)]
        only = await server.stub.GetLoads(pb.GetLoadsRequest(dp_rank=5))
        assert [load.dp_rank for load in only.loads] == [5]
        call.cancel()


async def test_an_unpinned_request_counts_where_vllm_put_it() -> None:
    llm = StubAsyncLLM(ranks=(4, 5), stats=False, step=slow)

    class Routed(dict):  # type: ignore[type-arg]
        def get(self, key: object, default: object = None) -> object:
            return b"\x05\x00"

    llm.engine_core.reqs_in_flight = Routed()
    async with served_vllm(llm) as server:
        call = server.stub.Generate(server.request("r", max_tokens=100_000))
        await call.read()
        loads = (await server.stub.GetLoads(pb.GetLoadsRequest())).loads
        assert [load.num_running_reqs for load in loads] == [0, 1]
        call.cancel()


async def test_flushing_waits_for_blocks_in_use() -> None:
    llm = StubAsyncLLM()
    async with served_vllm(llm) as server:
        assert (await server.stub.FlushCache(common_pb2.FlushCacheRequest())).success
        llm.resets = [False, False, True]
        assert (await server.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=9))).success
        llm.resets = [False]
        refused = await server.stub.FlushCache(common_pb2.FlushCacheRequest())
        assert not refused.success
        assert "rank 0 is in use" in refused.message
        with pytest.raises(grpc.aio.AioRpcError) as late:
            await server.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.01))
        assert late.value.code() is CODE.DEADLINE_EXCEEDED


async def test_the_profiler_is_started_and_stopped() -> None:
    llm = StubAsyncLLM(vllm_config(profiler_config__profiler="torch"))
    async with served_vllm(llm) as server:
        assert (await server.stub.StartProfile(common_pb2.StartProfileRequest())).success
        assert (await server.stub.StopProfile(common_pb2.StopProfileRequest())).success
        assert llm.profiles == ["start", "stop"]
        with pytest.raises(grpc.aio.AioRpcError, match="output_dir") as refused:
            await server.stub.StartProfile(common_pb2.StartProfileRequest(output_dir="/x"))
        assert refused.value.code() is CODE.INVALID_ARGUMENT


async def test_a_cancelled_profile_is_left_to_the_engine() -> None:
    llm = StubAsyncLLM(vllm_config(profiler_config__profiler="torch"))
    asked = asyncio.Event()

    async def forever() -> None:
        asked.set()
        await asyncio.get_running_loop().create_future()

    llm.stop_profile = forever  # type: ignore[method-assign]
    async with served_vllm(llm) as server:
        call = server.stub.StopProfile(common_pb2.StopProfileRequest())
        await until(asked.is_set)
        call.cancel()
