"""Health answers quickly whatever the load: the server, its load and the prober are processes."""

from __future__ import annotations

import asyncio
import multiprocessing
from time import perf_counter
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_grpc_servicer.testing.dialects import DIALECTS
from tests.support.grpc_queues import ONE_FOR_ALL
from tests.support.servers import serving

STREAMS = 200
PROBES = 200
DIALECT = DIALECTS["mlx"]


BURST = 1000
"""Requests at once."""


def load(address: str, tokens: int, streams: int = STREAMS) -> None:
    """Keep all streams running for about as long as the probing takes."""

    async def one(stub: object, index: int) -> None:
        request = DIALECT.generate(f"r{index}", [5], max_tokens=tokens)
        async for _ in stub.Generate(request):  # type: ignore[attr-defined]
            pass

    async def main() -> None:
        async with grpc.aio.insecure_channel(address) as channel:
            stub = DIALECT.stub(channel)
            await asyncio.gather(*(one(stub, index) for index in range(streams)))

    asyncio.run(main())


@pytest.mark.timeout(120)
async def test_health_answers_within_50_ms_while_200_streams_run() -> None:
    """P4: Check's 99th percentile, for liveness and readiness alike."""
    options = ("--step-seconds", "0.1")
    async with serving(*options, module="smg_grpc_servicer.testing") as server:
        spawn = multiprocessing.get_context("spawn")
        loader = spawn.Process(target=load, args=(server.address, 400))
        loader.start()
        try:
            times = await asyncio.to_thread(probe, server.address)
        finally:
            loader.kill()
            loader.join()

    times.sort()
    assert times[int(len(times) * 0.99)] < 0.05, f"p99 of {times[-5:]}"


def probe(address: str) -> list[float]:
    """Seconds of each Check once all streams run, on a thread that does nothing else."""
    with grpc.insecure_channel(address) as channel:
        info = channel.unary_unary(
            f"/{DIALECT.service}/GetServerInfo",
            request_serializer=DIALECT.pb.GetServerInfoRequest.SerializeToString,
            response_deserializer=DIALECT.pb.GetServerInfoResponse.FromString,
        )
        end = perf_counter() + 30
        while info(DIALECT.pb.GetServerInfoRequest(), timeout=10).active_requests < STREAMS:
            assert perf_counter() < end, "the load did not come up"
        health = health_pb2_grpc.HealthStub(channel)
        times = []
        for at in range(PROBES):
            request = health_pb2.HealthCheckRequest(service=("", DIALECT.service)[at % 2])
            begin = perf_counter()
            answer = health.Check(request, timeout=5)
            times.append(perf_counter() - begin)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        assert info(DIALECT.pb.GetServerInfoRequest()).active_requests == STREAMS
        return times


@pytest.mark.skipif(ONE_FOR_ALL, reason="this grpcio has one queue for all methods")
@pytest.mark.timeout(120)
async def test_a_burst_of_requests_does_not_hold_up_health_and_abort() -> None:
    """P4: in one queue with a thousand requests a probe takes four seconds; gateways allow five."""
    options = ("--step-seconds", "0.05")
    async with serving(*options, module="smg_grpc_servicer.testing") as server:
        spawn = multiprocessing.get_context("spawn")
        loader = spawn.Process(target=load, args=(server.address, 400, BURST))
        loader.start()
        try:
            checks, aborts = await asyncio.to_thread(probe_burst, server.address)
        finally:
            loader.kill()
            loader.join()

    assert max(checks) < 1.0
    assert max(aborts) < 1.0


def probe_burst(address: str) -> tuple[list[float], list[float]]:
    """Seconds of each Check and Abort until the burst was taken in, on a thread of its own."""
    pb = DIALECT.pb
    channel: Any
    with grpc.insecure_channel(address) as channel:
        stub = DIALECT.stub(channel)
        health = health_pb2_grpc.HealthStub(channel)
        checks: list[float] = []
        aborts: list[float] = []
        end = perf_counter() + 60
        taken = stub.GetServerInfo.future(pb.GetServerInfoRequest())
        while not taken.done() or taken.result().active_requests < BURST:
            if taken.done():
                taken = stub.GetServerInfo.future(pb.GetServerInfoRequest())
            begin = perf_counter()
            assert begin < end, "the burst did not come"
            health.Check(health_pb2.HealthCheckRequest(), timeout=10)
            checked = perf_counter()
            stub.Abort(DIALECT.abort("nobody"), timeout=10)
            aborts.append(perf_counter() - checked)
            checks.append(checked - begin)
        return checks, aborts
