"""Two data-parallel ranks of a real engine, each a process of its own, behind one Rust server."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from time import monotonic
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import History
from tests.support.client import Client, connected
from tests.support.processes import descendants, exists, titles
from tests.support.real_vllm import ENGINE, NAME, VLLM, serving
from tests.support.servers import Server
from tests.support.vllm_cases import prompt
from tests.support.wait import until

FLAGS = ("--servicer-impl", "rust", "--drain-seconds", "1", "--data-parallel-size", "2")


@pytest.fixture(scope="module")
async def two(one_loop: None, model: Path, home: Path) -> AsyncIterator[Server]:
    async with serving(home, model, "--served-model-name", NAME, *ENGINE, *FLAGS) as server:
        yield server


@pytest.fixture(scope="module")
async def client(two: Server) -> AsyncIterator[Client]:
    async with connected(two.address, VLLM) as connection:
        yield connection


async def begun(client: Client, rank: int | None = None) -> tuple[Any, History]:
    """A long stream that has begun, on `rank` if one is named."""
    request = client.request(prompt(4), max_tokens=900)
    if rank is not None:
        request.data_parallel_rank = rank
    call = client.stub.Generate(request)
    first = await asyncio.wait_for(call.__aiter__().__anext__(), 20)
    return call, History(stream=True, messages=[first])


async def running(client: Client) -> list[int]:
    """Requests by rank."""
    loads = (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads
    return [load.num_running_reqs for load in sorted(loads, key=lambda load: load.dp_rank)]


async def all_told(client: Client, wanted: list[int]) -> None:
    end = monotonic() + 5
    while (seen := await running(client)) != wanted:
        assert monotonic() < end, seen


async def test_a_request_may_name_its_rank(client: Client) -> None:
    # Together, so that none is over before the last has begun.
    calls = await asyncio.gather(*(begun(client, rank) for rank in (1, 1, 0)))
    await all_told(client, [1, 2])
    for call, _ in calls:
        call.cancel()
    await all_told(client, [0, 0])


async def test_others_are_spread_over_both(client: Client) -> None:
    calls = await asyncio.gather(*(begun(client) for _ in range(6)))
    await all_told(client, [3, 3])
    for call, _ in calls:
        call.cancel()
    await all_told(client, [0, 0])


async def test_a_rank_that_is_not_there(client: Client) -> None:
    request = client.request(prompt(4), max_tokens=1)
    request.data_parallel_rank = 2
    history = await client.send(request)
    assert history.code is grpc.StatusCode.INTERNAL  # a later wheel says INVALID_ARGUMENT
    assert "rank 2 is out of range for 2 engine(s)" in history.details


async def test_the_end_of_one_rank_is_the_end(client: Client, two: Server) -> None:
    """Streams of both end at once, not when vLLM has given the other rank its time to end. The
    other one is stopped, as by a debugger: it is gone all the same.
    """
    calls = [await begun(client, rank) for rank in (0, 1)]
    family = descendants(two.pid)
    names = {title: pid for pid, title in titles(two.pid).items()}
    ranks = [next(pid for title, pid in names.items() if b"EngineCore_DP%d" % at in title)
             for at in (0, 1)]  # fmt: skip
    os.kill(ranks[0], SIGSTOP)
    os.kill(ranks[1], SIGKILL)
    start = monotonic()
    histories = await asyncio.gather(*(history.record(call) for call, history in calls))
    # This wheel says INTERNAL where it sees the loss itself, before it is stopped.
    ends = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}
    assert {history.code for history in histories} <= ends
    assert monotonic() - start < 5  # vLLM's own way takes that long for the other rank alone
    assert await two.exit_code(20) == 1
    await until(lambda: not any(map(exists, family)), 10)
    assert "EngineCore_DP1 was ended by SIGKILL" in two.log
