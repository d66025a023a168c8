"""Asking a server's health, the way every test of it needs."""

from __future__ import annotations

from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVING = health_pb2.HealthCheckResponse.SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


async def check(channel: grpc.aio.Channel, name: str = "") -> int:
    """The status of a name."""
    stub = health_pb2_grpc.HealthStub(channel)
    answer = await stub.Check(health_pb2.HealthCheckRequest(service=name), timeout=5)
    return int(answer.status)


def watch(channel: grpc.aio.Channel, name: str = "") -> Any:
    """An open Watch; its `read()` gives answers."""
    stub = health_pb2_grpc.HealthStub(channel)
    return stub.Watch(health_pb2.HealthCheckRequest(service=name))


def names(channel: grpc.aio.Channel) -> Any:
    return health_pb2_grpc.HealthStub(channel).List(health_pb2.HealthListRequest(), timeout=5)
