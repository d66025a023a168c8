"""Other ways to start the server, and to stop it: each test has a launch of its own."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import time
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.json_format import MessageToDict
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.testing.history import check as broken
from tests.support.certificates import Authority
from tests.support.client import Client, connected
from tests.support.dial import NOT_SERVING, SERVING, check, watch
from tests.support.kv_served import Subscription
from tests.support.processes import descendants
from tests.support.proto_fuzz import Mutants, names_a_field
from tests.support.real_sglang import (
    CPU,
    NAME,
    SGLANG,
    START_SECONDS,
    serving,
    started,
)
from tests.support.sglang_cases import GREEDY, VOCAB, prompt

PLAIN = (*CPU, "--grammar-backend", "none", "--served-model-name", NAME)


async def test_rows_16_and_31_tls_and_a_stop_under_load(model: Path, tmp_path: Path) -> None:
    """Warm-up knows the server's own credentials; a client needs one of the authority's.

    SIGTERM lets streams end well, and leaves nothing behind.
    """
    authority = Authority(tmp_path)
    server_files, client_files = authority.issue("server"), authority.issue("client")
    tls = (
        "--ssl-certfile", str(server_files.cert), "--ssl-keyfile", str(server_files.key),
        "--ssl-ca-certs", str(authority.cert),
    )  # fmt: skip
    ours = ("--drain-seconds", "45", "--no-reflection")
    async with started(model, *PLAIN, *tls, *ours) as server:
        address = await server.bound(START_SECONDS)
        assert "'drain_seconds': '45 (flag)', 'reflection': 'off (flag)'" in server.log
        await server.printed("state: serving", START_SECONDS)
        root = authority.cert.read_bytes()
        mine = grpc.ssl_channel_credentials(
            root, client_files.key.read_bytes(), client_files.cert.read_bytes()
        )
        async with grpc.aio.secure_channel(address, grpc.ssl_channel_credentials(root)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await check(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
        async with grpc.aio.secure_channel(address, mine) as channel:
            client = Client(channel, SGLANG)
            running = [await client.begin(prompt(8, at), max_tokens=150) for at in range(4)]
            server.signal(signal.SIGTERM)
            await server.printed("state: draining")
            late = await client.generate(prompt(3, 1), max_tokens=1)
            assert late.code is grpc.StatusCode.UNAVAILABLE
            for call, history in running:
                await history.record(call)
                assert broken(history) == []
        assert await server.exit_code(60) == 0, server.log
        assert "did not end and are killed" not in server.log
        assert not descendants(server.pid)


async def test_a_stop_while_it_loads(model: Path, tmp_path: Path) -> None:
    """The port answers before the ranks are there; SIGTERM ends it all at once, with code 0, and
    leaves no process and no socket of SGLang's.
    """
    async with started(model, *PLAIN, env={"TMPDIR": str(tmp_path)}) as server:
        address = await server.bound(START_SECONDS)
        async with connected(address, SGLANG) as client:
            assert await check(client.channel) == SERVING
            assert await check(client.channel, SGLANG.service) == NOT_SERVING
            history = await client.generate(prompt(3, 1), max_tokens=1)
            assert history.code is grpc.StatusCode.UNAVAILABLE
            assert "loading" in history.details
        await server.printed("server_args=", START_SECONDS)
        family = descendants(server.pid)
        start = time.monotonic()
        server.signal(signal.SIGTERM)
        assert await server.exit_code(30) == 0, server.log
        assert time.monotonic() - start < 8
        assert not [pid for pid in family if _runs(pid)]
        assert await asyncio.to_thread(os.listdir, tmp_path) == []


async def test_row_32_a_port_in_use(model: Path) -> None:
    """One line, code 2, and no rank is started; what we log is JSON if asked."""
    with socket.socket() as holder:
        port = auto.free_ports(1)
        holder.bind(("127.0.0.1", port))
        holder.listen()
        async with started(model, *PLAIN, "--log-format", "json", port=port) as server:
            assert await server.exit_code(START_SECONDS) == 2, server.log
            ours = [json.loads(line) for line in server.log.splitlines() if line[:1] == "{"]
            assert any("settings" in line["msg"] for line in ours), server.log
            (error,) = [line["msg"] for line in ours if line["level"] == "error"]
            assert f"port {port} is in use" in error
            assert "Load weight" not in server.log


async def test_two_ranks_that_embed(model: Path) -> None:
    """Data parallel: a controller between us and the ranks; each has its load and its events."""
    flags = (*PLAIN, "--is-embedding", "--dp-size", "2")
    async with serving(model, *flags) as server, connected(server.address, SGLANG) as client:
        pb = client.pb
        vectors = []
        for rank in (0, 1):
            request = pb.EmbedRequest(
                request_id=f"e{rank}",
                tokenized={"input_ids": [5, 6, 7]},
                data_parallel_rank=rank,
            )
            answer = await client.stub.Embed(request)
            assert answer.embedding_dim == len(answer.embedding) == 64
            assert answer.prompt_tokens == 3
            vectors.append(list(answer.embedding))
        assert vectors[0] == vectors[1]
        info = await client.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert not info.is_generation
        told = await client.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert MessageToDict(told.server_args)["dp_size"] == 2
        while len((await client.stub.GetLoads(pb.GetLoadsRequest())).loads) < 2:
            pass
        history = await client.generate(prompt(3, 1), max_tokens=1)
        assert history.code is grpc.StatusCode.INVALID_ARGUMENT
        await _embed_anything(client)
        flush = common_pb2.FlushCacheRequest(timeout_s=5)
        assert (await client.stub.FlushCache(flush)).success
        # A rank is the controller's child, not ours; its end is noticed all the same.
        answers = watch(client.channel, SGLANG.service)
        assert (await answers.read()).status == SERVING
        ranks = [pid for pid in descendants(server.pid) if _is_rank(pid)]
        assert len(ranks) == 2
        os.kill(ranks[1], signal.SIGKILL)
        assert (await asyncio.wait_for(answers.read(), 5)).status == NOT_SERVING
        assert await server.exit_code(40) == 1
        assert not [pid for pid in ranks if _runs(pid)]


async def test_two_ranks_that_generate(model: Path, offline: Any) -> None:
    """Pinned or not, a request is answered by one rank as one engine alone would answer it."""
    case = GREEDY["greedy 3"]
    wanted = offline["llama"]["greedy 3"]["ids"]
    async with (
        serving(model, *PLAIN, "--dp-size", "2") as server,
        connected(server.address, SGLANG) as client,
    ):
        call = client.stub.SubscribeKvEvents(common_pb2.SubscribeKvEventsRequest(), timeout=60)
        events = Subscription(call)
        for rank in (None, 0, 1):
            request = client.request(case.prompt, **case.sampling)
            if rank is not None:
                request.data_parallel_rank = rank
            history = await client.send(request)
            assert broken(history) == []
            assert list(history.complete().output_ids) == wanted
        # Each has cached the prompt and says so.
        while not all(events.indexes[rank].blocks for rank in (0, 1)):
            await events.read()
        call.cancel()
        beyond = client.request(case.prompt, **case.sampling)
        beyond.data_parallel_rank = 2
        refused = await client.send(beyond)
        assert refused.code is grpc.StatusCode.INVALID_ARGUMENT
        assert refused.details.startswith("data_parallel_rank")
        loads = await client.stub.GetLoads(client.pb.GetLoadsRequest())
        assert [load.dp_rank for load in loads.loads] == [0, 1]
        assert (await client.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=5))).success


async def _embed_anything(client: Client) -> None:
    """Whatever is in the request: a vector, or a status that names the field."""
    good = client.pb.EmbedRequest(tokenized={"input_ids": [5, 6, 7]})
    odd = {"tokenized.input_ids": (5, VOCAB - 1, VOCAB), "data_parallel_rank": (0, 1, 2)}
    for at, request in enumerate(islice(Mutants(good, odd, 0, alone=("mm_inputs",)), 150)):
        request.request_id = request.request_id or f"any-{at}"
        call = client.stub.Embed(request, timeout=20)
        code, details = await call.code(), await call.details()
        if code is grpc.StatusCode.OK:
            assert len((await call).embedding) == 64
        elif code is not grpc.StatusCode.UNIMPLEMENTED:
            assert code is grpc.StatusCode.INVALID_ARGUMENT, f"{details}\n{request}"
            assert names_a_field(details, request.DESCRIPTOR), details


def _is_rank(pid: int) -> bool:
    try:
        return b"sglang::scheduler" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False


def _runs(pid: int) -> bool:
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
