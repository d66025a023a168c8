"""The Prometheus endpoint must never be what takes a servicer down."""

from __future__ import annotations

import asyncio
import logging
import socket
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import monotonic
from urllib.request import urlopen

import grpc
import pytest

from smg_grpc_servicer.core import metrics_server
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.metrics import RecordedMetrics
from smg_grpc_servicer.core.metrics_server import MetricsServer
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.server import GrpcServer
from smg_grpc_servicer.mlx.servicer import MlxEngineServicer
from smg_grpc_servicer.testing import FakeEngine
from tests.support.dial import SERVING, check
from tests.support.wait import until


def scrape(port: int, path: str = "/metrics", host: str = "127.0.0.1") -> str:
    with urlopen(f"http://{host}:{port}{path}", timeout=5) as answer:
        body: bytes = answer.read()
    return body.decode()


async def test_a_scrape_tells_the_state(caplog: pytest.LogCaptureFixture) -> None:
    """T6: the endpoint answers while loading and with the engine dead."""
    caplog.set_level(logging.INFO)
    board = StatusBoard()
    metrics = RecordedMetrics("mlx", state=lambda: board.condition)
    server = GrpcServer(ServerOptions(metrics_port=0), board, metrics)
    await server.bind()
    line = next(m for m in caplog.messages if m.startswith("metrics on "))
    port = int(line.removesuffix("/metrics").rpartition(":")[2])
    text = await asyncio.to_thread(scrape, port)
    assert 'smg_servicer_state{engine="mlx",model="",state="starting"} 1.0' in text
    board.dead("it broke")
    text = await asyncio.to_thread(scrape, port)
    assert 'smg_servicer_state{engine="mlx",model="",state="dead"} 1.0' in text
    await server.stop(0)
    with pytest.raises(OSError, match="refused"):
        await asyncio.to_thread(scrape, port)


async def test_a_port_conflict_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """T6: the metrics port is taken: the server starts, and says so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        server = GrpcServer(ServerOptions(metrics_port=port), StatusBoard(), RecordedMetrics("mlx"))
        address = await server.bind()
        async with grpc.aio.insecure_channel(str(address)) as channel:
            assert await check(channel) == SERVING
        await server.stop(0)
    assert f"no metrics: cannot listen on 127.0.0.1:{port} (Address already in use)" in caplog.text


async def test_silent_clients_hold_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """T6: clients that connect and say nothing are dropped, and few of them have a thread."""
    assert metrics_server._Handler.timeout == metrics_server.CLIENT_SECONDS
    monkeypatch.setattr(metrics_server._Handler, "timeout", 0.5)
    server = MetricsServer.start(RecordedMetrics("mlx"), "127.0.0.1", 0)
    assert server is not None
    silent = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(64)]
    start = monotonic()
    text = ""
    while not text:  # refused as long as the silent ones hold every slot
        try:
            text = await asyncio.to_thread(scrape, server.port)
        except OSError:
            assert monotonic() - start < 10
    assert "smg_servicer_in_flight" in text
    for connection in silent:
        connection.close()
    start = monotonic()
    await asyncio.to_thread(server.close)
    assert monotonic() - start < 2


async def test_a_client_that_dribbles_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    """T6: a byte now and then keeps no thread: the time is for the whole of a connection."""
    monkeypatch.setattr(metrics_server, "CLIENT_SECONDS", 0.5)
    server = MetricsServer.start(RecordedMetrics("mlx"), "127.0.0.1", 0)
    assert server is not None
    assert metrics_server._Handler.timeout > 2  # so it is not what drops them

    def dribble(connection: socket.socket) -> float:
        """Seconds until the other side is gone; a byte every tenth of one."""
        start = monotonic()
        connection.settimeout(0.1)
        with connection:
            while monotonic() - start < 4:
                try:
                    connection.sendall(b"G")
                    if not connection.recv(1000):
                        break
                except TimeoutError:
                    continue
                except OSError:
                    break
        return monotonic() - start

    clients = [
        socket.create_connection(("127.0.0.1", server.port))
        for _ in range(metrics_server.MAX_CLIENTS)
    ]
    times = await asyncio.gather(*(asyncio.to_thread(dribble, client) for client in clients))
    assert max(times) < 3
    assert "smg_servicer_in_flight" in await asyncio.to_thread(scrape, server.port)
    await until(lambda: not server._server._deadlines)
    await asyncio.to_thread(server.close)


async def test_a_fault_in_what_is_asked_is_a_500(caplog: pytest.LogCaptureFixture) -> None:
    """T6: a failing snapshot ends one scrape, not the endpoint."""
    broken = True

    def state() -> str:
        if broken:
            raise RuntimeError("no snapshot")
        return "serving"

    server = MetricsServer.start(RecordedMetrics("mlx", state=state), "127.0.0.1", 0)
    assert server is not None
    with pytest.raises(OSError, match="500"):
        await asyncio.to_thread(scrape, server.port)
    await until(lambda: "no snapshot" in caplog.text)
    broken = False
    assert "serving" in await asyncio.to_thread(scrape, server.port)
    with pytest.raises(OSError, match="404"):
        await asyncio.to_thread(scrape, server.port, "/etc/passwd")
    server.close()


async def test_without_the_extra_the_flag_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The extra is named, and without the flag nobody misses it."""
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    metrics = RecordedMetrics("mlx")
    server = GrpcServer(ServerOptions(metrics_port=0), StatusBoard(), metrics)
    with pytest.raises(ConfigError, match=r"--metrics-port: .*smg-grpc-servicer\[metrics\]"):
        await server.bind()
    plain = GrpcServer(ServerOptions(), StatusBoard(), metrics)
    await plain.bind()
    await plain.stop(0)


@pytest.mark.skipif(not Path("/proc/net/if_inet6").exists(), reason="no IPv6 here")
async def test_ipv6() -> None:
    """Q3: the endpoint listens where the servicer does."""
    server = MetricsServer.start(RecordedMetrics("mlx"), "::1", 0)
    assert server is not None
    assert "smg_servicer" in await asyncio.to_thread(scrape, server.port, "/", "[::1]")
    server.close()


async def test_the_servicers_own_figures_are_served(monkeypatch: pytest.MonkeyPatch) -> None:
    """Gauges, and counters where the name says so; a loop that hangs costs only these."""
    monkeypatch.setattr(metrics_server, "DETAILS_SECONDS", 0.2)
    engine = FakeEngine()
    metrics = RecordedMetrics("mlx")
    engine.counters = lambda: {"prefix_bytes": 5, "prefix_hits_total": 3}  # type: ignore[method-assign]
    MlxEngineServicer(engine, StatusBoard(), metrics=metrics)
    server = MetricsServer.start(metrics, "127.0.0.1", 0)
    assert server is not None
    try:
        text = await asyncio.to_thread(scrape, server.port)
        assert 'smg_servicer_pending{engine="mlx",model=""} 0.0' in text
        assert 'smg_servicer_engine_prefix_bytes{engine="mlx",model=""} 5.0' in text
        assert "# TYPE smg_servicer_engine_prefix_hits_total counter" in text
        assert text.count("# TYPE smg_servicer_in_flight gauge") == 1
        with ThreadPoolExecutor(1) as pool:  # asked for while the loop waits here
            text = pool.submit(scrape, server.port).result()
        assert "smg_servicer_in_flight" in text
        assert "smg_servicer_engine_prefix_bytes" not in text
    finally:
        server.close()
