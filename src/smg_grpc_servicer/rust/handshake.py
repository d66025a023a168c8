"""The address at which engines dial in, before anybody listens on it.

A port that is only looked up and freed again may be somebody else's a moment later. So it is bound
here, with SO_REUSEADDR and without listening, and stays bound: the binding, which sets the same
option, can listen on it, and the system gives it to nobody else. So it is on Linux; elsewhere two
sockets cannot share a port in that way, and it is freed.
"""

from __future__ import annotations

import contextlib
import socket
import sys
from collections.abc import Iterator

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.rust.plan import EngineAddress, RustPlan
from smg_grpc_servicer.rust.socket_dir import Sockets

HOST = "127.0.0.1"


@contextlib.contextmanager
def address(plan: RustPlan, sockets: Sockets) -> Iterator[EngineAddress]:
    """Where the engine of `plan` shall dial; kept for it while the context lasts.

    :raises ConfigError: the port that was asked for is in use, or asked for twice.
    """
    port = plan.knobs.handshake_port
    where = plan.knobs.asked.get("handshake_port", "handshake port")
    others = {plan.port: "the server"}
    if plan.metrics is not None:
        others[plan.metrics.port] = "metrics"
    if port and port in others:
        # Both would be bound, but only one can listen, which shows when the engine has started.
        raise ConfigError(
            f"{where}: got {port}, the port of {others[port]}; allowed: another, or 0"
        )
    if plan.ipc_handshake and not port:
        yield EngineAddress(sockets.handshake_url)
        return
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as held:
        held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            held.bind((HOST, port))
        except OSError as error:
            raise ConfigError(
                f"{where}: got {port} ({error.strerror}); allowed: a free port of {HOST}, or 0"
            ) from None
        address = EngineAddress(f"tcp://{HOST}:{held.getsockname()[1]}")
        if sys.platform != "linux":
            held.close()
        yield address
