"""Every call that the Rust path serves, on a real engine; what the conformance suite does not ask.

The suite (`test_conformance.py`) has streams, counts, ids, logprobs, health and shutdown.
"""

from __future__ import annotations

import asyncio
import io
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.testing.history import check
from tests.support.client import Client
from tests.support.kv_served import subscribed
from tests.support.processes import guard_of, titles
from tests.support.real_vllm import CONTEXT, NAME, SEQUENCES
from tests.support.servers import Server
from tests.support.vllm_cases import SCHEMA, VOCAB, prompt

BLOCK = 128
"""Tokens in a KV block of vLLM on a CPU."""


async def test_a_planned_warm_up_was_answered_before_it_was_ready(
    client: Client, server: Server
) -> None:
    """All of it by the real engine, and its prompts are in no cache."""
    del client
    log = server.log
    done = re.search(r"warm-up: (\d+) answered, 0 failed", log)
    assert done is not None
    assert int(done[1]) > 2 * SEQUENCES
    assert done.start() < log.index("serving on grpc://")
    assert "stay in the prefix cache" not in log
    assert "smg 1.13.0 serves vLLM" in log


async def test_the_engine_is_told_of_as_on_the_python_path(
    client: Client, model: Path, words: Any
) -> None:
    info = await client.stub.GetModelInfo(client.pb.GetModelInfoRequest())
    config = json.loads((model / "config.json").read_text())
    assert info.model_path == info.tokenizer_path == str(model)
    assert info.served_model_name == NAME
    assert info.is_generation
    assert not info.supports_vision
    assert info.max_context_length == info.max_req_input_len == CONTEXT
    assert info.vocab_size == config["vocab_size"] == VOCAB
    assert list(info.architectures) == config["architectures"]
    assert info.eos_token_ids[0] == words.token_to_id("<|im_end|>")
    generation = json.loads((model / "generation_config.json").read_text())
    assert set(info.eos_token_ids) >= set(generation["eos_token_id"])
    assert json.loads(info.default_sampling_params_json) == {
        name: pytest.approx(generation[name]) for name in ("temperature", "top_k", "top_p")
    }
    server = await client.stub.GetServerInfo(client.pb.GetServerInfoRequest())
    assert (server.server_type, server.data_parallel_size) == ("vllm-grpc", 1)
    assert (server.max_num_seqs, server.block_size) == (SEQUENCES, BLOCK)
    assert server.model_dtype == "torch.float32"
    assert server.constrained_decoding_start == "first_token"
    (row,) = (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads
    assert row.max_running_requests == SEQUENCES
    assert row.max_total_num_tokens > CONTEXT


async def test_the_tokenizer_is_sent(client: Client, model: Path) -> None:
    call = client.stub.GetTokenizer(common_pb2.GetTokenizerRequest())
    archive = zipfile.ZipFile(io.BytesIO(b"".join([chunk.data async for chunk in call])))
    assert archive.read("tokenizer.json") == (model / "tokenizer.json").read_bytes()


async def test_constraints_hold(client: Client, words: Any) -> None:
    history = await client.generate(prompt(5), json_schema=SCHEMA, max_tokens=120, ignore_eos=False)
    assert history.code is grpc.StatusCode.OK, history.details
    assert json.loads(words.decode(list(history.complete().output_ids)))["city"]


async def test_a_stop_string_ends_an_answer(client: Client, words: Any) -> None:
    ids = await client.ids(prompt(6), temperature=0.0, max_tokens=30)
    text = words.decode(ids)
    word = next(word for word in text.split()[1:] if word.isascii() and len(word) > 2)
    history = await client.generate(prompt(6), temperature=0.0, max_tokens=30, stop=[word])
    complete = history.complete()
    assert complete.finish_reason == "stop"
    assert len(complete.output_ids) < len(ids)


async def test_an_abort_ends_a_stream(client: Client) -> None:
    call, history = await client.begin(prompt(4), request_id="to-abort", max_tokens=900)
    await client.stub.Abort(client.pb.AbortRequest(request_ids=["to-abort", "unknown"]))
    history = await history.record(call)
    assert history.code is grpc.StatusCode.OK
    assert history.complete().finish_reason == "abort"
    check(history)


async def test_a_flush_empties_the_prefix_cache(client: Client) -> None:
    long = prompt(2 * BLOCK + 5, seed=3)
    await client.ids(long, max_tokens=1)
    again = await client.generate(long, max_tokens=1)
    assert again.complete().cached_tokens == 2 * BLOCK
    answer = await client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
    assert answer.success
    after = await client.generate(long, max_tokens=1)
    assert after.complete().cached_tokens == 0


async def test_kv_events_are_told(client: Client) -> None:
    """From the publisher that a launch without one is given."""
    async with subscribed(client.stub) as subscription:
        await client.ids(prompt(3 * BLOCK, seed=9), max_tokens=1)
        while len(subscription.index.blocks) < 3:
            await subscription.read()
    assert {block.block_size for block in subscription.stored()} == {BLOCK}


@pytest.mark.parametrize(
    ("name", "request_type", "status"),
    [
        ("StartProfile", common_pb2.StartProfileRequest, grpc.StatusCode.UNIMPLEMENTED),
        ("StopProfile", common_pb2.StopProfileRequest, grpc.StatusCode.UNIMPLEMENTED),
    ],
)
async def test_what_the_wheel_does_not_serve_it_says(
    client: Client, name: str, request_type: Any, status: grpc.StatusCode
) -> None:
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await getattr(client.stub, name)(request_type())
    assert refused.value.code() is status


async def test_a_generating_model_embeds_nothing(client: Client) -> None:
    request = client.pb.EmbedRequest(request_id="e")
    request.tokenized.input_ids.extend(prompt(3))
    with pytest.raises(grpc.aio.AioRpcError, match="does not support pooling") as refused:
        await client.stub.Embed(request)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_a_client_that_leaves_frees_the_engine(client: Client) -> None:
    call, _ = await client.begin(prompt(4), max_tokens=900)
    call.cancel()
    end = asyncio.get_running_loop().time() + 5
    while (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads[0].num_running_reqs:
        assert asyncio.get_running_loop().time() < end


async def test_a_guard_and_two_processes_of_vllm_serve_it(client: Client, server: Server) -> None:
    """The headless one and its engine's; vLLM's own helpers and workers are below them."""
    del client
    found = titles(server.pid)
    ours = {pid for pid, title in found.items() if b"smg_grpc_servicer.rust.child" in title}
    assert len(ours) == 2
    assert guard_of(server.pid) in ours
    assert sum(b"EngineCore" in title for title in found.values()) == 1
