"""What the server tells about its engine, and the calls that control it."""

from __future__ import annotations

import asyncio
import hashlib
import io
import json
import math
import re
import time
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import grpc
import pytest
from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.testing.history import check
from tests.support.client import Client
from tests.support.dial import SERVING
from tests.support.dial import check as health
from tests.support.real_vllm import CONTEXT, NAME, SEQUENCES, VLLM
from tests.support.servers import Server
from tests.support.vllm_cases import VOCAB, prompt

BLOCK = 128
"""Tokens in a KV block of vLLM on a CPU."""


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


def shared_memory() -> str:
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return f"{boot}:{Path('/dev/shm').stat().st_dev}"


async def loads(client: Client) -> Any:
    (row,) = (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads
    return row


async def test_model_facts(client: Client, model: Path, words: Any) -> None:
    """Equal to the files the engine was configured from."""
    info = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
    config = json.loads((model / "config.json").read_text())
    assert info.model_path == info.tokenizer_path == str(model)
    assert info.served_model_name == NAME
    assert info.is_generation
    assert not info.supports_vision
    assert info.max_context_length == info.max_req_input_len == CONTEXT
    assert info.vocab_size == config["vocab_size"] == VOCAB
    assert info.model_type == config["model_type"]
    assert list(info.architectures) == config["architectures"]
    assert list(info.eos_token_ids) == [words.token_to_id("<|im_end|>")]
    assert info.pad_token_id == info.bos_token_id == words.token_to_id("<|endoftext|>")
    defaults = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
    assert json.loads(info.default_sampling_params_json) == defaults


async def test_server_facts(client: Client) -> None:
    before = time.time()
    await client.ids(prompt(4, 50), max_tokens=1)
    info = await client.stub.GetServerInfo(client.pb.GetServerInfoRequest())
    assert info.server_type == "vllm-grpc"
    assert info.data_parallel_size == 1
    assert info.max_num_seqs == SEQUENCES
    assert info.block_size == BLOCK
    assert info.model_dtype == "torch.float32"
    assert info.multimodal_encoder_dtype == "float32"
    assert info.kv_cache_dtype == "auto"
    assert info.constrained_decoding_start == "first_token"
    assert info.shm_namespace_id == shared_memory()
    assert info.uptime_seconds > 0
    assert before <= info.last_receive_timestamp <= time.time()
    assert not info.active_requests
    assert not info.is_paused
    for name in ("kv_connector", "kv_role", "kv_engine_id", "engine_reasoning_parser"):
        assert getattr(info, name) == "", name
    assert info.mm_processor == ""


async def test_health_in_all_its_forms(client: Client) -> None:
    answer = await client.stub.HealthCheck(client.pb.HealthCheckRequest())
    assert (answer.healthy, answer.message) == (True, "OK")
    assert await health(client.channel) == SERVING
    assert await health(client.channel, VLLM.service) == SERVING


async def test_loads_idle_and_under_load(client: Client) -> None:
    """vLLM's own figures, one row for its one rank; what waits beyond its limit is counted."""
    await client.ids(prompt(4, 51), max_tokens=1)
    idle = await loads(client)
    assert (idle.dp_rank, idle.num_running_reqs, idle.num_waiting_reqs) == (0, 0, 0)
    assert idle.max_running_requests == SEQUENCES
    assert idle.max_total_num_tokens % BLOCK == 0
    assert idle.max_total_num_tokens > 0
    many = SEQUENCES + 8
    started = [await client.begin(prompt(20, 52 + at), max_tokens=600) for at in range(4)]
    rest = [client.request(prompt(20, 60 + at), max_tokens=600) for at in range(many - 4)]
    running = [asyncio.ensure_future(h.record(call)) for call, h in started]
    running += [asyncio.ensure_future(client.send(r)) for r in rest]
    await client.until_active(many)

    async def full() -> Any:
        while (row := await loads(client)).num_total_reqs < many or not row.gen_throughput:
            assert not any(task.done() for task in running), row
        return row

    busy = await full()
    assert busy.num_running_reqs == SEQUENCES
    assert busy.num_waiting_reqs == many - SEQUENCES
    assert busy.num_total_reqs == many
    assert 0 < busy.token_usage < 1
    assert busy.utilization == busy.token_usage
    assert busy.num_used_tokens >= SEQUENCES * BLOCK
    assert busy.num_waiting_uncached_tokens > 0
    # Not at once is an answer, which the gateway counts as a worker that did not flush.
    at_once = await client.stub.FlushCache(common_pb2.FlushCacheRequest())
    assert not at_once.success
    assert "in use" in at_once.message
    request = common_pb2.FlushCacheRequest(timeout_s=0.3)
    code, details = await refusal(client.stub.FlushCache(request))
    assert code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert "in use" in details
    assert [check(h) for h in await asyncio.gather(*running)] == [[]] * many
    await client.ids(prompt(4, 53), max_tokens=1)
    assert (await loads(client)).num_total_reqs == 0
    response = await client.stub.GetLoads(client.pb.GetLoadsRequest(dp_rank=7))
    assert len(response.loads) == 0


async def test_flush_forgets_the_prefixes(client: Client) -> None:
    ids = prompt(200, 54)
    for cached in (0, BLOCK):
        assert (await client.generate(ids, max_tokens=1)).complete().cached_tokens == cached
    answer = await client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
    assert answer.success
    assert (await client.generate(ids, max_tokens=1)).complete().cached_tokens == 0
    for seconds in (-1, math.nan, math.inf):
        request = common_pb2.FlushCacheRequest(timeout_s=seconds)
        code, details = await refusal(client.stub.FlushCache(request))
        assert code is grpc.StatusCode.INVALID_ARGUMENT
        assert details.startswith("timeout_s")


async def test_a_profile_is_refused_without_a_profiler(client: Client) -> None:
    """Said before the engine is asked, whose answer is a stack trace in the worker's log."""
    start = client.stub.StartProfile(common_pb2.StartProfileRequest())
    for call in (start, client.stub.StopProfile(common_pb2.StopProfileRequest())):
        code, details = await refusal(call)
        assert code is grpc.StatusCode.FAILED_PRECONDITION
        assert "--profiler-config" in details
    options = client.stub.StartProfile(common_pb2.StartProfileRequest(num_steps=3))
    code, details = await refusal(options)
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("num_steps")


async def test_the_tokenizer_arrives_whole(client: Client, model: Path) -> None:
    chunks = [c async for c in client.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            assert archive.read(name) == (model / name).read_bytes()


async def test_a_generating_model_does_not_embed(client: Client) -> None:
    request = client.pb.EmbedRequest(request_id="e", tokenized={"input_ids": [5, 6]})
    code, details = await refusal(client.stub.Embed(request))
    assert code is grpc.StatusCode.UNIMPLEMENTED
    assert "vLLM" in details


async def test_the_log_says_what_it_serves_and_no_more(server: Server, client: Client) -> None:
    """One line of settings, one a state; no line a request."""
    lines = [line for line in server.log.splitlines() if "smg" in line or "launch.py" in line]
    assert len([line for line in lines if "settings:" in line]) <= 1
    before = len(server.log.splitlines())
    for at in range(5):
        await client.ids(prompt(4, 55 + at), max_tokens=2)
    grown = [line for line in server.log.splitlines()[before:] if "loggers.py" not in line]
    assert grown == []


async def test_vllms_own_metrics_are_scraped_beside_ours(server: Server, client: Client) -> None:
    before = await scraped(server)
    await client.ids(prompt(5), max_tokens=7)
    after = await scraped(server)
    made = {name: after[name] - before[name] for name in after if name.endswith("_total")}
    assert made["vllm:generation_tokens_total"] == 7
    assert made["smg_servicer_generated_tokens_total"] == 7
    assert after["vllm:time_to_first_token_seconds_count"] >= 1


async def scraped(server: Server) -> dict[str, float]:
    """Values by name, added up over their labels."""
    where = re.search(r"metrics on (http://\S+)", server.log)
    assert where is not None
    text = (await asyncio.to_thread(urlopen, where[1], timeout=10)).read().decode()
    values: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            values[sample.name] += sample.value
    return values
