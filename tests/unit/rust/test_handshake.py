"""Where engines dial in, and what is known of connections."""

from __future__ import annotations

import socket
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.network import Address
from smg_grpc_servicer.rust import connections, handshake
from smg_grpc_servicer.rust.knobs import RustKnobs
from smg_grpc_servicer.rust.plan import EngineAddress, RustPlan
from smg_grpc_servicer.rust.socket_dir import Sockets

SOCKETS = Sockets(Path("/nowhere"), "servicer")
PLAN = RustPlan(
    engine="vllm",
    server_class="Server",
    model_path="m",
    host="127.0.0.1",
    port=0,
    launch=lambda address: (),
    knobs=RustKnobs(),
)


@pytest.mark.skipif(sys.platform != "linux", reason="it is kept on Linux only")
def test_a_kept_port_is_nobody_elses_and_the_bindings() -> None:
    """A looked-up free port can be anybody's before the binding listens on it."""
    with handshake.address(PLAN, SOCKETS) as address:
        assert address == EngineAddress(f"tcp://127.0.0.1:{address.port}")
        assert (address.host, address.is_ipc) == ("127.0.0.1", False)
        with socket.socket() as stranger, pytest.raises(OSError, match="in use"):
            stranger.bind((address.host, address.port))
        with socket.socket() as binding:
            binding.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            binding.bind((address.host, address.port))
            binding.listen()


def test_a_socket_file_where_the_engine_can_dial_one() -> None:
    with handshake.address(replace(PLAN, ipc_handshake=True), SOCKETS) as address:
        assert address.url == SOCKETS.handshake_url
        assert address.is_ipc


def test_a_port_that_was_asked_for() -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    asked = RustKnobs(handshake_port=port, asked={"handshake_port": "SMG_X"})
    with handshake.address(replace(PLAN, ipc_handshake=True, knobs=asked), SOCKETS) as address:
        assert address.port == port
        again = replace(PLAN, knobs=replace(asked, handshake_port=port))
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen()
            with (
                pytest.raises(ConfigError, match=rf"^SMG_X: got {port} \(Address already in use\)"),
                handshake.address(again, SOCKETS),
            ):
                pass


@pytest.mark.parametrize("of", ["the server", "metrics"])
def test_a_port_that_was_asked_for_twice(of: str) -> None:
    """Both are bound and one listens: told when the engine had loaded, with exit code 1."""
    asked = RustKnobs(handshake_port=5557, asked={"handshake_port": "SMG_X"})
    metrics = Address("127.0.0.1", 5557) if of == "metrics" else None
    twice = replace(PLAN, knobs=asked, port=0 if metrics else 5557, metrics=metrics)
    with (
        pytest.raises(ConfigError, match=f"^SMG_X: got 5557, the port of {of}; allowed: another"),
        handshake.address(twice, SOCKETS),
    ):
        pass


@pytest.mark.skipif(sys.platform != "linux", reason="there is no /proc")
@pytest.mark.parametrize("host", ["127.0.0.1", "::1"])
def test_connections_are_counted(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as listener:
        listener.bind((host, 0))
        listener.listen()
        port = listener.getsockname()[1]
        assert connections.count(port) == 0
        with socket.create_connection((host, port)):
            assert connections.count(port) == 1


def test_where_nobody_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "TABLES", Path("/nowhere"))
    assert connections.count(1) is None
