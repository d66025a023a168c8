"""Servers started without standard streams, or with full ones: `2>&-`, `>/dev/full`."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from tests.support.servers import ROOT

MODULE = "smg_grpc_servicer.testing"
LINUX = sys.platform.startswith("linux")
only_linux = pytest.mark.skipif(not LINUX, reason="needs /dev/full, which Linux has")


@asynccontextmanager
async def shell(redirection: str, *arguments: str) -> AsyncIterator[subprocess.Popen[bytes]]:
    """A server under a shell's redirection; gone at the end of the block."""
    words = [sys.executable, "-m", MODULE, *arguments]
    process = subprocess.Popen(  # noqa: ASYNC220 - it is not waited for here
        ["/bin/sh", "-c", f'exec "$@" {redirection}', "sh", *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=dict(os.environ, PYTHONPATH=str(ROOT / "src")),
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()


def leads_to(pid: int, numbers: list[int]) -> set[str]:
    return {str(Path(f"/proc/{pid}/fd/{number}").readlink()) for number in numbers}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


async def alive(port: int) -> None:
    """Wait until it answers: it has nowhere to say that it listens."""
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        request = health_pb2.HealthCheckRequest()
        answer = await stub.Check(request, wait_for_ready=True, timeout=20)
        assert answer.status == health_pb2.HealthCheckResponse.SERVING


@pytest.mark.parametrize(
    ("redirection", "closed"),
    [("2>&-", [2]), (">&- 2>&-", [1, 2]), ("<&- >&- 2>&-", [0, 1, 2]), ("<&-", [0])],
)
async def test_a_server_without_standard_streams_serves(
    redirection: str, closed: list[int]
) -> None:
    """Nothing else gets descriptors 0 to 2: uvloop aborts (134) when it does, and what is written
    as standard error would go down a connection.
    """
    port = free_port()
    async with shell(redirection, "--port", str(port)) as process:
        await alive(port)
        if LINUX:
            assert leads_to(process.pid, closed) == {os.devnull}
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0


@only_linux
async def test_a_server_with_a_full_log_serves() -> None:
    port = free_port()
    async with shell(">/dev/full 2>/dev/full", "--port", str(port)) as process:
        await alive(port)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 20) == 0


@pytest.mark.parametrize(
    "redirection",
    ["2>&-", ">&- 2>&-", pytest.param("2>/dev/full", marks=only_linux)],
)
@pytest.mark.parametrize("arguments", [("--port", "99999"), ("--no-such-flag",)])
async def test_a_setting_that_cannot_work_exits_2_all_the_same(
    redirection: str, arguments: tuple[str, ...]
) -> None:
    """Supervisors tell a wrong setting (2) from a crash, also when nobody reads the words."""
    async with shell(redirection, *arguments) as process:
        assert await asyncio.to_thread(process.wait, 20) == 2
