"""Two data-parallel ranks of a real engine behind the Python servicer, until one of them dies."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from pathlib import Path
from signal import SIGKILL
from time import monotonic
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import History
from tests.support.client import Client, connected
from tests.support.real import titled
from tests.support.real_vllm import ENGINE, NAME, VLLM, serving
from tests.support.servers import Server
from tests.support.vllm_cases import prompt


@pytest.fixture(scope="module")
async def two(model: Path, home: Path) -> AsyncIterator[Server]:
    flags = ("--served-model-name", NAME, *ENGINE, "--data-parallel-size", "2")
    async with serving(home, model, *flags) as server:
        yield server


@pytest.fixture(scope="module")
async def pair(two: Server) -> AsyncIterator[Client]:
    async with connected(two.address, VLLM) as connection:
        yield connection


async def begun(client: Client, rank: int) -> tuple[Any, History]:
    request = client.request(prompt(4), max_tokens=900)
    request.data_parallel_rank = rank
    call = client.stub.Generate(request)
    first = await asyncio.wait_for(call.__aiter__().__anext__(), 20)
    return call, History(stream=True, messages=[first])


async def test_each_rank_has_a_row_and_its_requests(pair: Client) -> None:
    calls = await asyncio.gather(*(begun(pair, rank) for rank in (1, 1, 0)))
    answer = await pair.stub.GetLoads(pair.pb.GetLoadsRequest())
    assert {load.dp_rank: load.num_running_reqs for load in answer.loads} == {0: 1, 1: 2}
    info = await pair.stub.GetServerInfo(pair.pb.GetServerInfoRequest())
    assert info.data_parallel_size == 2
    for call, _ in calls:
        call.cancel()


async def test_a_rank_that_is_not_there_is_refused(pair: Client) -> None:
    request = pair.request(prompt(4), max_tokens=1)
    request.data_parallel_rank = 2
    history = await pair.send(request)
    assert history.code is grpc.StatusCode.INVALID_ARGUMENT
    assert history.details.startswith("data_parallel_rank: must be between 0 and 1")


async def test_one_rank_that_dies_is_the_end_of_all_at_once(pair: Client, two: Server) -> None:
    """vLLM itself first ends the other rank, whose requests then look as if they were aborted, and
    for up to 5 s says nothing of the dead one: a gateway would go on sending it requests.
    """
    running = [await begun(pair, rank) for rank in (0, 0, 1, 1)]
    core = titled(two, b"EngineCore_DP0")
    start = monotonic()
    os.kill(core, SIGKILL)
    ended = await asyncio.gather(*(history.record(call) for call, history in running))
    assert monotonic() - start < 1
    assert [history.code for history in ended] == [grpc.StatusCode.UNAVAILABLE] * 4
    assert all("EngineCore_DP0" in history.details for history in ended)
    health = await pair.stub.HealthCheck(pair.pb.HealthCheckRequest())
    assert not health.healthy
    assert await two.exit_code(30) == 1
