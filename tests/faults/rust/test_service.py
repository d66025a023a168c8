"""The Rust server over a stub core, while nothing goes wrong."""

from __future__ import annotations

import asyncio
import os
import urllib.request
from pathlib import Path
from signal import SIGKILL, SIGTERM, SIGUSR1

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.rust_served import Wheel, served, wheel
from tests.support.stub_core import FIRST_TOKEN

PROMPT = [5, 6, 7]


@pytest.mark.parametrize("handshake", [(), ("--tcp",)], ids=["ipc", "tcp"])
async def test_from_start_to_end(binding: Wheel, folder: Path, handshake: tuple[str, ...]) -> None:
    """The tcp handshake's port is kept from everybody else until the binding listens on it."""
    async with served(binding, folder, *handshake, DRAIN_SECS="30") as server:
        await server.saying("serving on grpc://")
        ids = await server.client.ids(PROMPT, max_tokens=5)
        assert ids == list(range(FIRST_TOKEN, FIRST_TOKEN + 5))
        assert await health(server.address) == "SERVING"
        assert len(server.files) in (2, 3)
        await server.client.channel.close()
        server.child.signal(SIGTERM)
        assert await server.exit_code(10) == 0
        assert server.files == []


async def test_a_setting_the_wheel_does_not_know_is_left_out(folder: Path) -> None:
    """Servicer 0.14.1 ends with a TypeError over smg 1.13.0: an unknown keyword."""
    async with served(Wheel("older"), folder) as server:
        await server.saying("serving on grpc://")
        lines = [line for line in server.child.lines if " WARNING " in line]
        assert len(lines) == 1
        assert "smg 1.13.0: its VllmGrpcServer takes no runs_mooncake; left out" in lines[0]


async def test_readiness_is_held_while_it_warms_up(binding: Wheel, folder: Path) -> None:
    async with served(binding, folder, "--warm-up") as server:
        assert await server.saying("warming (.*)") == server.address
        assert await health(server.address) == "NOT_SERVING"
        server.child.signal(SIGUSR1)
        await server.saying("serving on grpc://")
        assert await health(server.address) == "SERVING"
        assert len(await server.client.ids(PROMPT, max_tokens=3)) == 3


async def test_two_ranks(binding: Wheel, folder: Path) -> None:
    """It serves when both have connected, and the end of one is the end."""
    async with served(binding, folder, "--ranks", "2") as server:
        await server.saying("serving on grpc://")
        assert sum("at registered" in line for line in server.child.lines) == 2
        assert len(await server.client.ids(PROMPT, max_tokens=3)) == 3
        engine = server.engine
        assert engine is not None
        os.kill(engine, SIGKILL)
        assert await server.exit_code(10) == 1
        assert server.engine is None


async def test_metrics(folder: Path) -> None:
    async with served(wheel("newer"), folder, "--metrics") as server:
        url = await server.saying(r"metrics on (http://\S+)")
        with await asyncio.to_thread(urllib.request.urlopen, url, timeout=5) as answer:
            assert b"smg_servicer_state" in answer.read()


async def health(address: str) -> str:
    async with grpc.aio.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=5)
    return str(health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status))
