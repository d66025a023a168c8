"""An engine with what an operator may switch on: a KV connector, a profiler, a reasoning parser,
no statistics. One start for all of it.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.testing.history import History, check
from tests.support.client import Client, connected
from tests.support.real_vllm import ENGINE, NAME, SEQUENCES, VLLM, serving
from tests.support.router import routing
from tests.support.servers import Server
from tests.support.vllm_cases import prompt
from tests.support.wait import until

CONNECTOR, TOLD = "NixlConnector", "told.jsonl"
"""Of `tests.support.vllm_connector`, which can be imported only beside vLLM."""
ENGINE_ID = "engine-7"
STORED = 256
"""Tokens of a prompt of 300 whose KV is handed over: whole blocks of 128."""
PREFILL: dict[str, Any] = {
    "do_remote_decode": True, "do_remote_prefill": False, "none": None, "big": 2**63 + 1,
    "nested": {"list": [1, [2, None]], "text": "\u00e9\n"},
}  # fmt: skip


@dataclass(frozen=True)
class Equipped:
    """The server, and the folders its connector and its profiler write to."""

    server: Server
    client: Client
    storage: Path
    traces: Path

    def told(self) -> list[dict[str, Any]]:
        """What the connector has heard of ends so far."""
        file = self.storage / TOLD
        lines = file.read_text().splitlines() if file.exists() else []
        return [json.loads(line) for line in lines]

    async def hears(self, since: int, count: int = 1) -> list[dict[str, Any]]:
        """What came after the first `since`, once it is that much."""
        await until(lambda: len(self.told()) >= since + count, seconds=5.0)
        return self.told()[since:]

    async def flush(self) -> None:
        answer = await self.client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))
        assert answer.success, answer.message

    async def leg(self, ids: list[int], params: str | None, **options: Any) -> History:
        """One leg of a request as the gateway sends it."""
        request = self.client.request(ids, **{"stream": False, "max_tokens": 12, **options})
        if params is not None:
            request.kv_transfer_params_json = params
        return await self.client.send(request)

    async def prefill(self, ids: list[int]) -> Any:
        history = await self.leg(ids, json.dumps(PREFILL), max_tokens=1)
        assert check(history) == []
        return history.complete()


@pytest.fixture(scope="module")
async def equipped(one_loop: None, model: Path, home: Path) -> AsyncIterator[Equipped]:
    storage, traces = home / "kv", home / "traces"
    storage.mkdir()
    child = {
        "kv_connector": CONNECTOR,
        "kv_connector_module_path": "tests.support.vllm_connector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": {"shared_storage_path": str(storage)},
    }
    connector = {
        "kv_connector": "MultiConnector",
        "kv_role": "kv_both",
        "engine_id": ENGINE_ID,
        "kv_connector_extra_config": {"connectors": [child]},
    }
    flags = (
        "--served-model-name", NAME, *ENGINE, "--disable-log-stats",
        "--reasoning-parser", "qwen3",
        "--kv-transfer-config", json.dumps(connector),
        "--profiler-config", json.dumps({"profiler": "torch", "torch_profiler_dir": str(traces)}),
    )  # fmt: skip
    async with (
        serving(home, model, *flags) as server,
        connected(server.address, VLLM) as client,
    ):
        yield Equipped(server, client, storage, traces)


async def test_facts_name_what_was_switched_on(equipped: Equipped) -> None:
    """The one child of a `MultiConnector` that the gateway can pair by, under the parent's id."""
    info = await equipped.client.stub.GetServerInfo(VLLM.pb.GetServerInfoRequest())
    assert (info.kv_connector, info.kv_role) == (CONNECTOR, "kv_both")
    assert info.kv_engine_id == ENGINE_ID
    assert info.engine_reasoning_parser == "qwen3"
    assert info.constrained_decoding_start == "after_reasoning"
    assert info.max_num_seqs == SEQUENCES


async def test_prefill_hands_over_to_decode(equipped: Equipped) -> None:
    """K1: parameters arrive as they were sent, both ways, and decode computes on fetched KV."""
    ids = prompt(300, 80)
    before = len(equipped.told())
    done = await equipped.prefill(ids)
    back = json.loads(done.kv_transfer_params_json)
    assert back["echo"] == PREFILL
    assert (done.kv_transfer_params.remote_host, done.kv_transfer_params.remote_port) == (
        "10.0.0.7", 5557,
    )  # fmt: skip
    await equipped.flush()
    computed = await equipped.leg(ids, None)
    await equipped.flush()
    fetched = await equipped.leg(ids, done.kv_transfer_params_json)
    assert check(fetched) == []
    assert list(fetched.complete().output_ids) == list(computed.complete().output_ids)
    first, plain, decode = equipped.told()[before:]
    assert first["params"] == PREFILL
    assert plain["params"] is None
    assert decode["params"] == back
    assert [told["loaded"] for told in (first, plain, decode)] == [0, 0, STORED]

    # That the ids come from what was fetched, and not from a second computation.
    for file in equipped.storage.rglob("*.safetensors"):
        raw = file.read_bytes()
        head = 8 + int.from_bytes(raw[:8], "little")
        file.write_bytes(raw[:head] + bytes(len(raw) - head))
    await equipped.flush()
    wrong = await equipped.leg(ids, done.kv_transfer_params_json)
    assert list(wrong.complete().output_ids) != list(computed.complete().output_ids)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_refused_decode_is_told_to_the_connector_once(
    equipped: Equipped, stream: bool
) -> None:
    """K3: the real connector hears `request_finished` of a request that never ran."""
    params = (await equipped.prefill(prompt(300, 81))).kv_transfer_params_json
    before = len(equipped.told())
    refused = await equipped.leg(prompt(300, 81), params, temperature=-1.0, stream=stream)
    assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
    (told,) = await equipped.hears(before)
    assert told["params"] == json.loads(params)
    assert (told["status"], told["loaded"]) == ("FINISHED_ABORTED", None)
    assert check(await equipped.leg(prompt(300, 81), params)) == []
    assert len(equipped.told()) == before + 2


async def test_a_decode_that_leaves_is_told_to_the_connector_once(equipped: Equipped) -> None:
    """It was taken, so the engine tells, and we do not."""
    ids = prompt(300, 82)
    params = (await equipped.prefill(ids)).kv_transfer_params_json
    before = len(equipped.told())
    request = equipped.client.request(ids, max_tokens=600)
    request.kv_transfer_params_json = params
    call = equipped.client.stub.Generate(request)
    await call.read()
    call.cancel()
    (told,) = await equipped.hears(before)
    assert told["params"] == json.loads(params)
    await equipped.leg(ids, None, max_tokens=1)
    assert len(equipped.told()) == before + 2


async def test_the_router_pairs_its_two_legs(
    equipped: Equipped, tmp_path: Path, words: Any
) -> None:
    """The gateway's own prefill and decode, both served by this one worker under two addresses."""
    port = equipped.server.address.rpartition(":")[2]
    options = (
        "--pd-disaggregation",
        "--prefill", f"grpc://127.0.0.1:{port}",
        "--decode", f"grpc://localhost:{port}",
    )  # fmt: skip
    ids = words.encode("one two three " * 60).ids
    async with routing(tmp_path, options=options) as router:
        await router.serves(NAME)
        for stream in (False, True):
            before = len(equipped.told())
            body = {"model": NAME, "temperature": 0, "max_tokens": 9, "ignore_eos": True}
            if stream:
                body |= {"stream": True, "stream_options": {"include_usage": True}}
            answer = await router.post("/v1/completions", prompt="one two three " * 60, **body)
            assert answer.status == 200, answer.text
            prefill, decode = await equipped.hears(before, 2)
            assert prefill["params"]["do_remote_decode"] is True
            assert decode["params"]["do_remote_prefill"] is True
            assert decode["params"]["echo"] == prefill["params"]
            parts = answer.events if stream else [answer.json]
            usage = [part["usage"] for part in parts if part.get("usage")][-1]
            assert (usage["prompt_tokens"], usage["completion_tokens"]) == (len(ids), 9)


async def test_the_profiler_writes_a_trace(equipped: Equipped) -> None:
    """A second start is a conflict that vLLM itself names."""
    stub = equipped.client.stub
    start = common_pb2.StartProfileRequest()
    assert (await stub.StartProfile(start)).success
    with pytest.raises(grpc.aio.AioRpcError) as second:
        await stub.StartProfile(start)
    assert second.value.code() is grpc.StatusCode.FAILED_PRECONDITION
    await equipped.client.ids(prompt(5, 83), max_tokens=2)
    assert (await stub.StopProfile(common_pb2.StopProfileRequest())).success
    assert list(equipped.traces.rglob("*.json*"))
    with pytest.raises(grpc.aio.AioRpcError) as options:
        await stub.StartProfile(common_pb2.StartProfileRequest(with_stack=False))
    assert options.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def test_loads_without_the_engines_statistics(equipped: Equipped) -> None:
    """T9 and weak point 15: a worker with `--disable-log-stats` read as idle for ever."""
    client = equipped.client
    many = SEQUENCES + 4
    first, history = await client.begin(prompt(20, 84), max_tokens=150)
    requests = [client.request(prompt(20, 85 + at), max_tokens=150) for at in range(many - 1)]
    running = [asyncio.ensure_future(history.record(first))]
    running += [asyncio.ensure_future(client.send(request)) for request in requests]
    await client.until_active(many)
    (row,) = (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads
    assert row.dp_rank == 0
    assert row.num_running_reqs == SEQUENCES
    assert row.num_waiting_reqs == many - SEQUENCES
    assert row.num_total_reqs == many
    assert row.max_running_requests == SEQUENCES
    assert row.max_total_num_tokens > 0
    assert row.token_usage == row.num_used_tokens == 0, "nobody told: left out"
    assert [check(h) for h in await asyncio.gather(*running)] == [[]] * many
    (row,) = (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads
    assert row.num_total_reqs == 0
    assert row.gen_throughput > 0


async def test_a_constraint_may_hold_from_the_first_token(equipped: Equipped, words: Any) -> None:
    """Weak point 5: with a reasoning parser vLLM lets noise think first, unless told otherwise."""
    options: dict[str, Any] = {"max_tokens": 20, "ignore_eos": False, "regex": "[a-d]{3}-[0-9]{2}"}
    thinking = await equipped.client.ids(prompt(10, 86), **options)
    assert len(thinking) == 20
    held = await equipped.client.ids(prompt(10, 86), **options, grammar_from_first_token=True)
    text = words.decode(held)
    assert text[3:4] == "-", text
    assert text[4:].isdigit()
