"""Hosts and ports as users write them: the server listens, and says where to dial it."""

from __future__ import annotations

import logging
import socket

import grpc
import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.network import parse_host
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer
from tests.support.dial import SERVING, check
from tests.support.slow_service import SlowService, echo


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        return False
    return True


HOSTS = ["127.0.0.1", "0.0.0.0", "localhost"] + (["::1", "::", "[::1]"] if has_ipv6() else [])


@pytest.mark.parametrize("host", HOSTS)
async def test_the_printed_address_can_be_dialled(
    host: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Q3: whatever the host, what the server prints is an address that answers."""
    caplog.set_level(logging.INFO)
    server = GrpcServer(ServerOptions(host=parse_host(host)), StatusBoard())
    await server.bind()
    printed = [r.getMessage() for r in caplog.records if "listening on grpc" in r.getMessage()]
    address, *beside = printed[0].removeprefix("listening on grpc://").split(maxsplit=1)
    wide = parse_host(host) in ("0.0.0.0", "::")
    told = f"and all other addresses of this machine ({parse_host(host)})"
    assert beside == ([told] if wide else [])
    async with grpc.aio.insecure_channel(address) as channel:
        assert await check(channel) == SERVING
    await server.stop(0)


@pytest.mark.parametrize("host", HOSTS)
async def test_a_port_is_never_shared(host: str) -> None:
    """U5, V12: a second server on the same address does not start, and the error says why."""
    first = GrpcServer(ServerOptions(host=parse_host(host)), StatusBoard())
    port = (await first.bind()).port
    second = GrpcServer(ServerOptions(host=parse_host(host), port=port), StatusBoard())
    with pytest.raises(ConfigError, match=f"port {port} is in use on"):
        await second.bind()
    await first.stop(0)


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6 loopback")
async def test_half_a_name_is_not_enough() -> None:
    """U5: when another server has one of localhost's addresses, that is a port in use."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = GrpcServer(ServerOptions(host="localhost", port=port), StatusBoard())
        with pytest.raises(ConfigError, match=f"port {port} is in use on localhost"):
            await server.bind()


@pytest.mark.parametrize(
    ("host", "words"),
    [
        ("192.0.2.1", "which is not an address of this machine"),
        ("no-such-host.invalid", "which does not resolve"),
    ],
)
async def test_a_foreign_host_is_named(host: str, words: str) -> None:
    """V12: a bind that fails says which flag and what would be allowed."""
    server = GrpcServer(ServerOptions(host=host), StatusBoard())
    with pytest.raises(ConfigError, match=f"--host: got '{host}', {words}"):
        await server.bind()


async def test_a_message_beyond_the_limit_is_refused() -> None:
    """L1: the receive limit holds, and a large message below it passes."""
    board = StatusBoard()
    board.serving()
    server = GrpcServer(ServerOptions(max_receive_bytes=8 * 2**20), board)
    SlowService(board).add_to(server)
    address = await server.bind()
    unlimited = [("grpc.max_receive_message_length", -1), ("grpc.max_send_message_length", -1)]
    async with grpc.aio.insecure_channel(str(address), options=unlimited) as channel:
        assert len(await echo(channel, bytes(6 * 2**20))) == 6 * 2**20
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await echo(channel, bytes(9 * 2**20))
        assert refused.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
    await server.stop(0)


async def test_a_wide_bind_warns(caplog: pytest.LogCaptureFixture) -> None:
    """Q1: listening for other machines without TLS or a token is said aloud; loopback is not."""
    for host in ("127.0.0.1", "0.0.0.0"):
        server = GrpcServer(ServerOptions(host=host), StatusBoard())
        await server.bind()
        await server.stop(0)
    warnings = [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]
    assert len(warnings) == 1
    assert "0.0.0.0" in warnings[0]
    assert "--tls-cert" in warnings[0]
    assert "--auth-token-file" in warnings[0]
