"""What the server tells about its engine, and the calls that control it."""

from __future__ import annotations

import asyncio
import hashlib
import http.client
import io
import json
import os
import time
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.testing.history import check
from tests.support.client import Client
from tests.support.dial import SERVING, watch
from tests.support.dial import check as health
from tests.support.real_sglang import ADMIN_KEY, NAME, SGLANG, TOKENS
from tests.support.servers import Server
from tests.support.sglang_cases import VOCAB, prompt
from tests.support.tiny_sglang import CONTEXT


async def refusal(call: Any) -> tuple[grpc.StatusCode, str]:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await call
    return refused.value.code(), refused.value.details() or ""


async def loads(client: Client, **asked: Any) -> Any:
    return await client.stub.GetLoads(client.pb.GetLoadsRequest(**asked))


async def test_row_11_model_facts_are_the_model_s(client: Client, model: Path, words: Any) -> None:
    """Equal to the files the engine was configured from, not defaults of another model."""
    info = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
    config = json.loads((model / "config.json").read_text())
    assert info.model_path == info.tokenizer_path == str(model)
    assert info.served_model_name == NAME
    assert info.is_generation
    assert info.max_context_length == CONTEXT
    assert 0 < info.max_req_input_len < CONTEXT
    assert info.vocab_size == config["vocab_size"] == VOCAB
    assert info.model_type == config["model_type"]
    assert list(info.architectures) == config["architectures"]
    ends = [words.token_to_id(token) for token in ("<|endoftext|>", "<|im_end|>")]
    assert sorted(info.eos_token_ids) == sorted(ends)
    assert info.pad_token_id == info.bos_token_id == words.token_to_id("<|endoftext|>")
    defaults = {"temperature": 0.7, "top_k": 20, "top_p": 0.95}
    assert json.loads(info.default_sampling_params_json) == defaults
    assert info.preferred_sampling_params == info.id2label_json == ""
    assert info.num_labels == 0


async def test_row_12_a_text_model_does_not_claim_to_see(client: Client) -> None:
    """By the model's own configuration; the unit tests have one that does."""
    info = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
    assert not info.supports_vision


async def test_server_facts(client: Client) -> None:
    before = time.time()
    await client.ids(prompt(4, 50), max_tokens=1)
    info = await client.stub.GetServerInfo(client.pb.GetServerInfoRequest())
    args = MessageToDict(info.server_args)
    assert info.server_type == "grpc"
    assert info.sglang_version
    assert info.max_total_num_tokens == TOKENS
    assert args["served_model_name"] == NAME
    assert args["dp_size"] == args["tp_size"] == 1
    assert args["max_running_requests"] == 32
    assert args["page_size"] == 4
    assert args["disaggregation_mode"] == "null"
    assert args["is_embedding"] is False
    assert args["grammar_backend"] == "xgrammar"
    assert args["constrained_decoding_start"] == "first_token"
    assert args["engine_reasoning_parser"] == ""
    assert "pairing_protocol" not in args
    assert "mm_item_limits" not in args
    assert MessageToDict(info.scheduler_info)["max_req_input_len"] < CONTEXT
    assert info.uptime_seconds > 0
    assert before <= info.last_receive_timestamp <= time.time()
    assert not info.is_paused


async def test_row_10_no_credential_leaves(client: Client, server: Server) -> None:
    info = await client.stub.GetServerInfo(client.pb.GetServerInfoRequest())
    assert ADMIN_KEY not in str(info)
    assert "admin_api_key" not in MessageToDict(info.server_args)
    assert "--admin-api-key has no effect" in server.log


async def test_health_in_all_its_forms(client: Client) -> None:
    answer = await client.stub.HealthCheck(client.pb.HealthCheckRequest())
    assert (answer.healthy, answer.message) == (True, "OK")
    assert await health(client.channel) == SERVING
    assert await health(client.channel, SGLANG.service) == SERVING
    code, _ = await refusal(health(client.channel, "nobody"))
    assert code is grpc.StatusCode.NOT_FOUND


async def test_row_33_a_watch_stays_open(client: Client) -> None:
    call = watch(client.channel, SGLANG.service)
    assert (await call.read()).status == SERVING
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(call.read(), 0.5)
    call.cancel()


async def test_reflection(client: Client) -> None:
    stub = reflection_pb2_grpc.ServerReflectionStub(client.channel)
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    call = stub.ServerReflectionInfo(iter([request]))
    answer = await call.read()
    assert SGLANG.service in [each.name for each in answer.list_services_response.service]
    call.cancel()


async def test_loads_idle_and_under_load(client: Client) -> None:
    """The scheduler's own figures; what waits beyond its limit is counted."""
    await client.ids(prompt(4, 51), max_tokens=1)
    while (report := await loads(client)).aggregate.total_reqs:
        pass
    (idle,) = report.loads
    assert (report.dp_rank_count, idle.dp_rank) == (1, 0)
    assert idle.max_running_requests == 32
    assert idle.max_total_num_tokens == TOKENS
    assert idle.HasField("memory")
    assert idle.memory.token_capacity == TOKENS
    assert idle.HasField("queues")
    assert report.version
    many = 40
    requests = [client.request(prompt(20, 60 + at), max_tokens=150) for at in range(many)]
    running = [asyncio.ensure_future(client.send(r)) for r in requests]

    async def full() -> Any:
        while (row := (await loads(client)).loads[0]).num_total_reqs < many:
            assert not all(task.done() for task in running), row
        return row

    busy = await full()
    assert busy.num_running_reqs + busy.num_waiting_reqs == busy.num_total_reqs == many
    assert busy.num_waiting_reqs >= many - 32
    assert busy.queues.waiting == busy.num_waiting_reqs
    assert [check(h) for h in await asyncio.gather(*running)] == [[]] * many


@pytest.mark.parametrize(
    ("include", "sections"),
    [
        ([], {"memory", "queues"}),
        (["core"], set()),
        (["memory"], {"memory"}),
        (["queues", "memory"], {"memory", "queues"}),
        (["all"], {"memory", "queues"}),
    ],
)
async def test_only_the_sections_that_were_asked_for(
    client: Client, include: list[str], sections: set[str]
) -> None:
    (row,) = (await loads(client, include=include)).loads
    assert {name for name in ("memory", "queues") if row.HasField(name)} == sections


async def test_loads_that_cannot_be_told(client: Client) -> None:
    code, details = await refusal(loads(client, include=["nonsense"]))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("include")
    assert not (await loads(client, dp_rank=7)).loads
    code, _ = await refusal(loads(client, dp_rank=-1))
    assert code is grpc.StatusCode.INVALID_ARGUMENT


async def test_flush_forgets_the_prefixes(client: Client) -> None:
    ids = prompt(200, 54)
    first, again = [(await client.generate(ids, max_tokens=1)).complete() for _ in range(2)]
    assert first.cached_tokens == 0
    assert again.cached_tokens > 150
    answer = await client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
    assert answer.success
    assert (await client.generate(ids, max_tokens=1)).complete().cached_tokens == 0


async def test_row_13_the_tokenizer_arrives_whole(client: Client, model: Path) -> None:
    chunks = [c async for c in client.stub.GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert chunks[-1].sha256 == hashlib.sha256(data).hexdigest()
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
            assert archive.read(name) == (model / name).read_bytes()
        # Row 37: the same bytes wherever it is made.
        assert {info.date_time[0] for info in archive.infolist()} == {1980}


async def test_a_profile_and_sglang_s_own_sidecar(
    client: Client, server: Server, tmp_path: Path
) -> None:
    """The sidecar reaches the scheduler through the manager it was handed."""

    def post(path: str) -> tuple[int, str]:
        port = server.sidecar  # type: ignore[attr-defined]
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
        try:
            connection.request("POST", path)
            answer = connection.getresponse()
            return answer.status, answer.read().decode()
        finally:
            connection.close()

    status, text = await asyncio.to_thread(post, "/stop_profile")
    assert (status, "not in progress" in text) == (500, True)
    request = common_pb2.StartProfileRequest(output_dir=str(tmp_path), activities=["CPU"])
    assert (await client.stub.StartProfile(request)).success
    await client.ids(prompt(4, 55), max_tokens=2)
    status, text = await asyncio.to_thread(post, "/stop_profile")
    assert status == 200, text
    assert await asyncio.to_thread(os.listdir, tmp_path)


async def test_a_generating_model_does_not_embed(client: Client) -> None:
    request = client.pb.EmbedRequest(request_id="e", tokenized={"input_ids": [5, 6]})
    code, details = await refusal(client.stub.Embed(request))
    assert code is grpc.StatusCode.INVALID_ARGUMENT
    assert details.startswith("EmbedRequest: the model generates")
