"""Starting a server as a child, loading it, and reading the clock: what the benchmarks share."""

from __future__ import annotations

import asyncio
import os
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_grpc_servicer.testing.dialects import DIALECTS

DIALECT = DIALECTS["mlx"]


def free_port() -> int:
    """A port that was free a moment ago; for servers that cannot take port 0."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@asynccontextmanager
async def server(
    command: Sequence[str], port: int, env: Mapping[str, str] | None = None
) -> AsyncIterator[Any]:
    """A stub for a server child that listens on `port`; the child ends with the block."""
    child = subprocess.Popen(  # noqa: ASYNC220 — before the clock starts
        command,
        env={**os.environ, **(env or {})},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            health = health_pb2_grpc.HealthStub(channel)
            request = health_pb2.HealthCheckRequest(service=DIALECT.service)
            for _ in range(600):
                if child.poll() is not None:
                    raise SystemExit(f"{' '.join(command)} ended with {child.returncode}")
                try:
                    answer = await health.Check(request, timeout=5)
                    if answer.status == health_pb2.HealthCheckResponse.SERVING:
                        break
                except grpc.RpcError:
                    pass
                await asyncio.sleep(0.1)
            yield DIALECT.stub(channel)
    finally:
        child.terminate()
        try:
            await asyncio.to_thread(child.wait, 15)
        except subprocess.TimeoutExpired:
            child.kill()


@dataclass
class Stream:
    """When one stream's tokens came; times are `perf_counter` seconds."""

    start: float = 0.0
    times: list[float] = field(default_factory=list)
    counts: list[int] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        return sum(self.counts)

    @property
    def ttft(self) -> float:
        return self.times[0] - self.start

    @property
    def worst_gap(self) -> float:
        return max(b - a for a, b in pairwise(self.times))


async def run_stream(stub: Any, request_id: str, prompt: Sequence[int], **options: Any) -> Stream:
    """One streamed request, read to its end."""
    stream = Stream(perf_counter())
    async for message in stub.Generate(DIALECT.generate(request_id, prompt, **options)):
        if message.WhichOneof("response") == "chunk":
            stream.times.append(perf_counter())
            stream.counts.append(len(message.chunk.token_ids))
    return stream


async def throughput(stub: Any, prompts: Sequence[Sequence[int]], **options: Any) -> float:
    """Output tokens a second with all prompts at once."""
    start = perf_counter()
    streams = await asyncio.gather(
        *(run_stream(stub, f"load-{at}", prompt, **options) for at, prompt in enumerate(prompts))
    )
    return sum(stream.tokens for stream in streams) / (perf_counter() - start)


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def blas() -> str | None:
    """Where a fast BLAS is, for processes that have to be given one by LD_PRELOAD."""
    for place in ("/usr/lib", "/usr/lib64"):
        for found in sorted(Path(place).rglob("libopenblas.so.0")):
            return str(found.resolve())
    return None


def ours(model: str, port: int, *flags: str) -> list[str]:
    return [
        sys.executable,
        "-m",
        "smg_grpc_servicer.mlx",
        "--model",
        model,
        "--port",
        str(port),
        *flags,
    ]


def published(python: str, model: str, port: int) -> list[str]:
    """The published package, a black box in a venv of its own."""
    module = "smg_grpc_servicer.mlx.server"
    return [
        python,
        "-I",
        "-m",
        module,
        "--model",
        model,
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
    ]


__all__ = [
    "DIALECT",
    "Stream",
    "blas",
    "free_port",
    "median",
    "ours",
    "published",
    "run_stream",
    "server",
    "throughput",
]
