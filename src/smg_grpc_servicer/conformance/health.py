"""Health: `grpc.health.v1` and the servicer's own HealthCheck tell the same, true story.

The protocol: https://github.com/grpc/grpc/blob/master/doc/health-checking.md
"""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import grpc
from grpc_health.v1 import health_pb2
from smg_grpc_proto.generated import trtllm_service_pb2, trtllm_service_pb2_grpc

from smg_grpc_servicer.conformance.registry import Failed, check, expect
from smg_grpc_servicer.conformance.target import Target, answered, status
from smg_grpc_servicer.testing.dialects import DIALECTS

UNKNOWN = "no.such.Service"
OPEN_SECONDS = 2.0
BUSY_STREAMS = 8
PROBE_SECONDS = 1.0
"""What a probe's answer may take while the server is busy; Kubernetes waits 1 s by default."""

_Status = health_pb2.HealthCheckResponse


def name_of(value: int) -> str:
    return str(_Status.ServingStatus.Name(value))


@check("health-check", "Check answers SERVING for the server and for its service")
async def health_check(target: Target) -> None:
    for service in ("", target.dialect.service):
        said = await target.health_status(service)
        expect(said == _Status.SERVING, f"{name_of(said)} for {service!r}")


@check("health-unknown", "Check of an unknown service is NOT_FOUND")
async def health_unknown(target: Target) -> None:
    try:
        said = await target.health_status(UNKNOWN)
    except grpc.aio.AioRpcError as error:
        expect(error.code() is grpc.StatusCode.NOT_FOUND, f"ended {error.code().name}")
        return
    raise Failed(f"OK, {name_of(said)}")


async def _watch(target: Target, service: str, wanted: int) -> None:
    """The first message is `wanted`, and the stream stays open."""
    request = health_pb2.HealthCheckRequest(service=service)
    call: Any = target.health.Watch(request, metadata=target.connection.metadata)
    try:
        first = await asyncio.wait_for(call.read(), target.timeout)
        if first is grpc.aio.EOF:
            raise Failed("ended without a message")
        expect(first.status == wanted, f"first message {name_of(first.status)}")
        second = asyncio.ensure_future(call.read())
        await asyncio.wait({second}, timeout=OPEN_SECONDS)
        if second.done():
            message = await second
            said = "ended" if message is grpc.aio.EOF else f"said {name_of(message.status)}"
            raise Failed(f"{said} within {OPEN_SECONDS:g} s although nothing changed")
    except grpc.aio.AioRpcError as error:
        raise Failed(f"ended {error.code().name} {error.details()!r}") from None
    finally:
        call.cancel()


@check("watch-server", "Watch of the server says SERVING and stays open")
async def watch_server(target: Target) -> None:
    await _watch(target, "", _Status.SERVING)


@check("watch-service", "Watch of the service says SERVING and stays open")
async def watch_service(target: Target) -> None:
    await _watch(target, target.dialect.service, _Status.SERVING)


@check("watch-unknown", "Watch of an unknown service says SERVICE_UNKNOWN and stays open")
async def watch_unknown(target: Target) -> None:
    await _watch(target, UNKNOWN, _Status.SERVICE_UNKNOWN)


async def _ready(target: Target) -> bool:
    """What the servicer's own HealthCheck says."""
    try:
        return bool((await target.management("HealthCheck")).healthy)
    except grpc.aio.AioRpcError as error:
        if error.code() is grpc.StatusCode.UNAVAILABLE:
            return False
        raise


@check("health-agrees", "HealthCheck and grpc.health.v1 say the same")
async def health_agrees(target: Target) -> str:
    own = await _ready(target)
    standard = await target.health_status(target.dialect.service) == _Status.SERVING
    expect(own == standard, f"healthy={own}, SERVING={standard}")
    return "healthy" if own else "not healthy"


@check("health-true", "a server that says SERVING serves")
async def health_true(target: Target) -> None:
    standard = await target.health_status(target.dialect.service) == _Status.SERVING
    own = await _ready(target)
    history = await target.ask(target.request(max_tokens=1))
    works = history.code is grpc.StatusCode.OK
    expect(works or not (own or standard), f"healthy, but Generate ended {status(history)}")


@check("health-busy", "probes are answered SERVING while streams run")
async def health_busy(target: Target) -> str:
    tokens = target.tokens_for(1.0, 200)
    streams = [target.send(target.request(max_tokens=tokens)) for _ in range(BUSY_STREAMS)]
    worst = 0.0
    for _ in range(20):
        start = monotonic()
        said = await target.health_status(target.dialect.service)
        expect(said == _Status.SERVING, f"{name_of(said)} under load")
        worst = max(worst, monotonic() - start)
        expect(worst < PROBE_SECONDS, f"an answer took {worst:.2f} s")
        expect(await _ready(target), "HealthCheck says not healthy under load")
    for stream in streams:
        answered(await stream.end())
    return f"slowest answer {worst * 1000:.0f} ms"


@check("one-engine", "the services of other engines are UNIMPLEMENTED: the first OK names a worker")
async def one_engine(target: Target) -> None:
    others = {
        dialect.service: (dialect.stub(target.channel), dialect.pb)
        for dialect in DIALECTS.values()
        if dialect is not target.dialect
    }
    others["trtllm.TrtllmService"] = (
        trtllm_service_pb2_grpc.TrtllmServiceStub(target.channel), trtllm_service_pb2,
    )  # fmt: skip
    for name, (stub, pb) in others.items():
        try:
            await target.call(stub.HealthCheck, pb.HealthCheckRequest())
        except grpc.aio.AioRpcError as error:
            code = error.code()
            expect(code is grpc.StatusCode.UNIMPLEMENTED, f"{name} ended {code.name}")
        else:
            raise Failed(f"{name} answers OK")
