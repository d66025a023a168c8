"""A publisher's ZMQ endpoints, by structure: who binds, and where a rank's events are to be had.

The rules are the publishers' own (`ZmqEventPublisher` of vLLM, SGLang and TokenSpeed): they bind a
wildcard, `::`, ipc and inproc endpoint and connect to any other, so for those the subscriber has
to bind; a rank adds its number to a tcp port and `_dp<rank>` to an inproc name; the replay
endpoint is always bound.
"""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass, replace

from smg_grpc_servicer.core.errors import ConfigError

_ALLOWED = "tcp://HOST:PORT, ipc://PATH or inproc://NAME"


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A parsed address. `host` is without brackets and empty for ipc and inproc."""

    scheme: str
    host: str = ""
    port: int = 0
    path: str = ""

    @property
    def is_ipv6(self) -> bool:
        return ":" in self.host

    def __str__(self) -> str:
        if self.scheme != "tcp":
            return f"{self.scheme}://{self.path}"
        host = f"[{self.host}]" if self.is_ipv6 else self.host
        return f"tcp://{host}:{self.port}"


@dataclass(frozen=True, slots=True)
class Source:
    """Where one rank's events come from."""

    rank: int
    live: Endpoint
    bind: bool
    """The publisher connects, so the subscriber binds."""
    replay: Endpoint | None
    topic: str = ""
    hwm: int = 100_000
    """Batches that may wait in the socket."""


def parse(text: str, *, where: str) -> Endpoint:
    """:param where: the setting, for the error text.
    :raises ConfigError: not an endpoint that can be subscribed to.
    """
    scheme, found, rest = text.strip().partition("://")
    if not found or not rest or scheme not in ("tcp", "ipc", "inproc"):
        raise ConfigError(f"{where}: got {text!r}; allowed: {_ALLOWED}")
    if scheme != "tcp":
        return Endpoint(scheme, path=rest)
    host, _, port = rest.rpartition(":")
    host = host.split(";")[-1]  # a source address may stand in front
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
    if not host:
        raise ConfigError(f"{where}: got {text!r}, which names no host; allowed: {_ALLOWED}")
    if not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{where}: got {text!r}; allowed: a port from 1 to 65535, because a subscriber has to "
            "know it"
        )
    return Endpoint(scheme, host, int(port))


def of_rank(endpoint: Endpoint, rank: int, *, where: str) -> Endpoint:
    """The endpoint of a data-parallel rank, as its publisher makes it.

    :raises ConfigError: the rank has none.
    """
    if rank == 0:
        return endpoint
    if endpoint.scheme == "inproc":
        return replace(endpoint, path=f"{endpoint.path}_dp{rank}")
    if endpoint.scheme == "ipc":
        raise ConfigError(f"{where}: got {endpoint} with several ranks; allowed: tcp://HOST:PORT")
    if endpoint.port + rank > 65535:
        raise ConfigError(
            f"{where}: got port {endpoint.port}, which leaves no port for rank {rank}"
        )
    return replace(endpoint, port=endpoint.port + rank)


def publisher_binds(endpoint: Endpoint, *, ipv4_wildcard: bool = False) -> bool:
    """By the publishers' own rule; SGLang's also takes 0.0.0.0 for a wildcard."""
    if endpoint.scheme != "tcp" or "*" in endpoint.host or "::" in endpoint.host:
        return True
    return ipv4_wildcard and endpoint.host == "0.0.0.0"  # noqa: S104 - compared, not bound


def reachable(endpoint: Endpoint) -> Endpoint:
    """Where to connect to for something bound there on this machine."""
    if endpoint.scheme != "tcp":
        return endpoint
    if endpoint.host == "*":
        return replace(endpoint, host="127.0.0.1")
    try:
        address = ipaddress.ip_address(endpoint.host.partition("%")[0])
    except ValueError:
        return endpoint
    if not address.is_unspecified:
        return endpoint
    return replace(endpoint, host="127.0.0.1" if address.version == 4 else "::1")


def source(
    rank: int,
    endpoint: str,
    replay_endpoint: str | None,
    *,
    resolved: bool = False,
    binds: bool | None = None,
    ipv4_wildcard: bool = False,
    topic: str = "",
    hwm: int = 100_000,
    where: str = "--kv-events-config",
) -> Source:
    """One rank's source.

    :param resolved: the endpoints are the rank's own, as its engine reports them; else the rank's
        are derived as its publisher derives them.
    :param binds: what the publisher was told to do with its endpoint; None = it follows its rule.
    :raises ConfigError: naming the key at fault.
    """

    def mine(text: str, key: str) -> Endpoint:
        parsed = parse(text, where=f"{where}: {key}")
        return parsed if resolved else of_rank(parsed, rank, where=f"{where}: {key}")

    live = mine(endpoint, "endpoint")
    if binds is None:
        binds = publisher_binds(live, ipv4_wildcard=ipv4_wildcard)
    replay = mine(replay_endpoint, "replay_endpoint") if replay_endpoint else None
    return Source(rank, reachable(live), not binds, replay and reachable(replay), topic, hwm)
