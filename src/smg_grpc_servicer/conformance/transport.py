"""The connection: pings of an idle client, many calls at once, tokens at the door."""

from __future__ import annotations

import asyncio

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_grpc_servicer.conformance.registry import Failed, NotApplicable, check, expect
from smg_grpc_servicer.conformance.target import Target, answered, output

IDLE_SECONDS = 5.0
PING_MILLISECONDS = 1000
CALLS = 32


@check("keepalive", "a client that pings each second without a call is not sent away")
async def keepalive(target: Target) -> None:
    channel = target.connection.open(
        ("grpc.keepalive_time_ms", PING_MILLISECONDS),
        ("grpc.keepalive_timeout_ms", 5000),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.max_pings_without_data", 0),
    )
    async with channel:
        await channel.channel_ready()
        ready = grpc.ChannelConnectivity.READY
        try:
            # A GOAWAY shows as the channel leaving READY.
            await asyncio.wait_for(channel.wait_for_state_change(ready), IDLE_SECONDS)
        except asyncio.TimeoutError:
            pass
        else:
            raise Failed(f"the connection was ended within {IDLE_SECONDS:g} s")
        await target.call(
            target.dialect.stub(channel).GetModelInfo, target.dialect.pb.GetModelInfoRequest()
        )


@check("many-calls", "32 streams at once are all served, or some refused as too many")
async def many_calls(target: Target) -> str:
    tokens = target.tokens_for(0.2, 8)
    histories = await asyncio.gather(
        *(target.ask(target.request(max_tokens=tokens)) for _ in range(CALLS))
    )
    refused = 0
    for history in histories:
        if history.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            refused += 1
            continue
        made = len(output(answered(history)))
        expect(made == tokens, f"{made} of {tokens} tokens")
    expect(refused < CALLS, "all were refused")
    return f"{CALLS - refused} served"


@check("token-required", "a call without the token is UNAUTHENTICATED; health needs none")
async def token_required(target: Target) -> None:
    if target.connection.token is None:
        raise NotApplicable("no --token-file given")
    stub = target.dialect.stub(target.channel)
    for name in ("GetModelInfo", "GetServerInfo"):
        request = getattr(target.dialect.pb, f"{name}Request")()
        for metadata in ((), (("authorization", "Bearer not-the-token"),)):
            try:
                await getattr(stub, name)(request, timeout=target.timeout, metadata=metadata)
            except grpc.aio.AioRpcError as error:
                code = error.code()
                expect(code is grpc.StatusCode.UNAUTHENTICATED, f"{name} ended {code.name}")
            else:
                raise Failed(f"{name} answers without the token")
    health = health_pb2_grpc.HealthStub(target.channel)
    await health.Check(health_pb2.HealthCheckRequest(), timeout=target.timeout)
