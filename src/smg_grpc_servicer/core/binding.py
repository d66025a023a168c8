"""Channel options of every server of ours, and binding a port with an error that says why.

The ping options are what lets the gateway (a ping every 30 s, also while idle) and a client at
10 s live through a silent ten-minute call: grpcio's defaults answer such pings with GOAWAY
"too_many_pings". Argument names: grpc's `include/grpc/impl/channel_arg_names.h`.
"""

from __future__ import annotations

import errno
import logging
import socket
from typing import TYPE_CHECKING

from smg_grpc_servicer.core import network
from smg_grpc_servicer.core.errors import ConfigError

if TYPE_CHECKING:
    import grpc

log = logging.getLogger(__name__)

TO_OURSELVES = [("grpc.enable_http_proxy", 0)]
"""Options of a channel to this very machine; gRPC would go through `http_proxy`."""


def channel_options(max_receive_bytes: int, max_send_bytes: int) -> list[tuple[str, int]]:
    """Options for `grpc.aio.server`."""
    return [
        ("grpc.max_receive_message_length", max_receive_bytes),
        ("grpc.max_send_message_length", max_send_bytes),
        # Two servers on one port would share its connections without a word.
        ("grpc.so_reuseport", 0),
        # Pings of clients: as often as they like, with or without calls or data.
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", 1),
        ("grpc.http2.max_ping_strikes", 0),
        ("grpc.http2.max_pings_without_data", 0),
        # Our own pings find a client whose machine is gone; its streams are then cancelled.
        ("grpc.keepalive_time_ms", 60_000),
        ("grpc.keepalive_timeout_ms", 20_000),
    ]


def bind(
    server: grpc.aio.Server,
    host: str,
    port: int,
    credentials: grpc.ServerCredentials | None = None,
) -> int:
    """Bind every address of `host`; the real port.

    A name is resolved here and bound address by address: gRPC itself is content when one of
    them works, which would leave localhost half ours and half another server's.

    :raises ConfigError: the port is in use, or the host is not one of this machine's.
    """
    failure: OSError | None = None
    bound = 0
    for address in _addresses(host):
        try:
            bound = _add(server, network.join(address, bound or port), credentials)
        except RuntimeError:
            # gRPC does not say why; the system does when asked the same question.
            failure = _why(address, bound or port)
            if failure.errno != errno.EADDRNOTAVAIL:
                raise _explain(host, port, failure) from None
    if not bound:
        raise _explain(host, port, failure)
    return bound


def warn_if_open(host: str, *, encrypted: bool, authenticated: bool) -> None:
    """Say what is missing on an address that other machines can reach."""
    if network.is_loopback(host):
        return
    missing = []
    if not encrypted:
        missing.append("no TLS (--tls-cert): anyone on the way can read and change traffic")
    if not authenticated:
        missing.append("no authentication (--auth-token-file): anyone who can reach it can use it")
    if missing:
        log.warning("listening on %s for other machines with %s", host, "; ".join(missing))


def _add(server: grpc.aio.Server, target: str, credentials: grpc.ServerCredentials | None) -> int:
    if credentials is None:
        port = server.add_insecure_port(target)
    else:
        port = server.add_secure_port(target, credentials)
    if port == 0:
        raise RuntimeError(target)
    return port


def _addresses(host: str) -> list[str]:
    if network.is_wildcard(host):
        return [host]
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(
            f"--host: got {host!r}, which does not resolve ({error.strerror}); "
            "allowed: an address or name of this machine"
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def _why(address: str, port: int) -> OSError:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((address, port))
            probe.listen(1)
    except OSError as error:
        return error
    return OSError(errno.EIO, "gRPC could not bind it")


def _explain(host: str, port: int, failure: OSError | None) -> ConfigError:
    target = network.join(host, port)
    if failure is not None and failure.errno == errno.EADDRINUSE:
        return ConfigError(f"--port: port {port} is in use on {host}; allowed: a free port, or 0")
    if failure is not None and failure.errno == errno.EACCES:
        return ConfigError(f"--port: no permission to listen on {target}")
    if failure is not None and failure.errno == errno.EADDRNOTAVAIL:
        return ConfigError(
            f"--host: got {host!r}, which is not an address of this machine; "
            "allowed: one that is, or 127.0.0.1, 0.0.0.0, ::"
        )
    detail = failure.strerror if failure is not None else "no address"
    return ConfigError(f"--host, --port: cannot listen on {target} ({detail})")
