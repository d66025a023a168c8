"""The ZMQ sockets of one rank: its live stream, when its publisher comes and goes, its replay.

Frames (vLLM, SGLang and TokenSpeed alike): live `[topic, sequence, payload]`; a replay request is
`["", start]` from a DEALER, its answers `["", topic, sequence, payload]` or, from TokenSpeed and
older SGLang, `["", sequence, payload]`, ended by a sequence of eight 0xFF. Sequence numbers are
eight bytes, big-endian.
"""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import zmq
from zmq.utils.monitor import recv_monitor_message

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.kv_events.endpoints import Endpoint, Source

END = b"\xff" * 8
RECONNECT_MS = 100
RECONNECT_MAX_MS = 1000

_EVENTS = zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED


class LiveSocket:
    """A SUB socket and its monitor. Opened by one thread, then used by one other."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], source: Source) -> None:
        """:raises ConfigError: the address cannot be bound or connected to."""
        self.source = source
        self.socket = context.socket(zmq.SUB)
        self.socket.linger = 0
        self.socket.rcvhwm = source.hwm
        self.socket.setsockopt(zmq.RECONNECT_IVL, RECONNECT_MS)
        self.socket.setsockopt(zmq.RECONNECT_IVL_MAX, RECONNECT_MAX_MS)
        self.socket.setsockopt(zmq.TCP_KEEPALIVE, 1)
        self.socket.setsockopt(zmq.IPV6, int(source.live.is_ipv6))
        self.socket.subscribe(source.topic)
        self.monitor: Any = None
        if source.live.scheme != "inproc":  # which has nothing to lose a connection by
            self.monitor = self.socket.get_monitor_socket(_EVENTS)
        try:
            if source.bind:
                self.socket.bind(str(_numeric(source.live)))
            else:
                self.socket.connect(str(source.live))
        except (zmq.ZMQError, OSError) as error:
            self.close()
            verb = "bound" if source.bind else "connected to"
            raise ConfigError(
                f"--kv-events-config: endpoint: {source.live} (rank {source.rank}) cannot be "
                f"{verb}: {error}"
            ) from error

    def receive(self) -> tuple[int, bytes] | None:
        """A batch.

        :raises zmq.Again: there is none.
        :raises ValueError: what came is no batch.
        """
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) < 3:
            raise ValueError(f"{len(frames)} frames")
        return _numbered(frames[-2:])

    def changes(self) -> list[bool]:
        """Since the last look: True for each connection made, False for each lost."""
        found = []
        while self.monitor is not None and self.monitor.poll(0):
            event = recv_monitor_message(self.monitor)["event"]
            if event in (zmq.Event.HANDSHAKE_SUCCEEDED, zmq.Event.DISCONNECTED):
                found.append(event == zmq.Event.HANDSHAKE_SUCCEEDED)
        return found

    def close(self) -> None:
        if self.monitor is not None:
            self.socket.disable_monitor()
            self.monitor.close(0)
            self.monitor = None
        self.socket.close(0)


class ReplaySocket:
    """One replay request and its answers."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], endpoint: Endpoint, start: int
    ) -> None:
        self.socket = context.socket(zmq.DEALER)
        self.socket.linger = 0
        # A reader that falls behind must not make the publisher drop batches.
        self.socket.rcvhwm = 0
        self.socket.setsockopt(zmq.IPV6, int(endpoint.is_ipv6))
        self.socket.connect(str(endpoint))
        self.socket.send_multipart([b"", start.to_bytes(8, "big")], zmq.NOBLOCK)

    def receive(self) -> tuple[int, bytes] | None:
        """A batch; None at the end.

        :raises zmq.Again: nothing yet.
        :raises ValueError: no answer of a publisher.
        """
        frames = self.socket.recv_multipart(zmq.NOBLOCK)
        if len(frames) not in (3, 4) or frames[0]:
            raise ValueError(f"{len(frames)} frames")
        return _numbered(frames[-2:])

    def close(self) -> None:
        self.socket.close(0)


def _numbered(frames: Sequence[bytes]) -> tuple[int, bytes] | None:
    number, payload = frames
    if number == END:
        return None
    if len(number) != 8:
        raise ValueError(f"a sequence number of {len(number)} bytes")
    return int.from_bytes(number, "big"), payload


def _numeric(endpoint: Endpoint) -> Endpoint:
    """A name to bind as an address, which is what ZMQ takes."""
    if endpoint.scheme != "tcp" or endpoint.host == "*":
        return endpoint
    try:
        ipaddress.ip_address(endpoint.host.partition("%")[0])
    except ValueError:
        found = socket.getaddrinfo(endpoint.host, endpoint.port, type=socket.SOCK_STREAM)
        return replace(endpoint, host=str(found[0][4][0]))
    return endpoint
