"""Pings of clients that gRPC's own defaults take for abuse."""

from __future__ import annotations

import asyncio

import grpc
import pytest

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer
from tests.support.dial import check
from tests.support.slow_service import SlowService, hold

PINGING = (
    # A hundred times the gateway's pace, so that seconds stand for minutes.
    ("grpc.keepalive_time_ms", 100),
    ("grpc.keepalive_timeout_ms", 2000),
    ("grpc.keepalive_permit_without_calls", 1),
    ("grpc.http2.max_pings_without_data", 0),
    ("grpc.use_local_subchannel_pool", 1),
)


async def test_a_pinging_client_lives_through_a_silent_call() -> None:
    """A1: some twenty pings and not one message: the stream still ends OK."""
    board = StatusBoard()
    board.serving()
    server = GrpcServer(ServerOptions(), board)
    SlowService(board).add_to(server)
    address = await server.bind()
    async with grpc.aio.insecure_channel(str(address), options=PINGING) as channel:
        stream = hold(channel, 2.5)
        assert [message async for message in stream] == [b"started", b"done"]
    await server.stop(0)


async def test_a_pinging_client_may_be_idle() -> None:
    """A3: pings without a call do not end the connection; without our options they do."""
    board = StatusBoard()
    server = GrpcServer(ServerOptions(), board)
    address = await server.bind()
    plain = grpc.aio.server()
    plain_port = plain.add_insecure_port("127.0.0.1:0")
    await plain.start()
    async with (
        grpc.aio.insecure_channel(str(address), options=PINGING) as ours,
        grpc.aio.insecure_channel(f"127.0.0.1:{plain_port}", options=PINGING) as theirs,
    ):
        await asyncio.gather(ours.channel_ready(), theirs.channel_ready())
        # The control shows that these pings would be punished, and how long that takes.
        await asyncio.wait_for(theirs.wait_for_state_change(grpc.ChannelConnectivity.READY), 10)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(ours.wait_for_state_change(grpc.ChannelConnectivity.READY), 2)
        await check(ours)
    await plain.stop(0)
    await server.stop(0)
