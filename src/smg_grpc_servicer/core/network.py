"""Hosts and ports: join, parse, and turn a bind address into one that can be dialled.

Pure functions over text; nothing is resolved. A host is kept without brackets; brackets are
added when a port is joined to an IPv6 literal. Errors: `ValueError` with the reason.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

_LABEL = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?<!-)")
_SCHEME = re.compile(r"^(grpcs?|https?|tcp)://", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Address:
    """A host (no brackets) and a port; `str()` gives `host:port` as gRPC and URLs want it."""

    host: str
    port: int

    def __str__(self) -> str:
        return join(self.host, self.port)

    @property
    def dialable(self) -> Address:
        """This address, with a wildcard host replaced by the loopback one of its family."""
        return Address(loopback_for(self.host), self.port)


def join(host: str, port: int) -> str:
    """`host:port`, with a bare IPv6 literal in brackets; bracketed hosts and names untouched."""
    if ":" in host and not host.startswith("["):
        host = f"[{host}]"
    return f"{host}:{port}"


def parse_port(text: str) -> int:
    """A port number 0..65535 in ASCII digits."""
    if not (text.isascii() and text.isdigit()) or int(text) > 65535:
        raise ValueError(f"{text!r} is not a port number (0 to 65535)")
    return int(text)


def parse_host(text: str) -> str:
    """A host without brackets: IPv4, IPv6 (with or without brackets or zone), or a DNS name."""
    host = text.strip()
    if host.startswith("[") and host.endswith("]"):
        host = host[1:-1]
        if ":" not in host:
            raise ValueError(f"{text!r}: brackets are for IPv6 addresses only")
    if _ip(host) is not None:
        return host
    if ":" in host:
        raise ValueError(f"{text!r} is not an IPv6 address (a port does not belong here)")
    labels = host.removesuffix(".").split(".")
    if len(host) > 253 or not all(_LABEL.fullmatch(label) for label in labels):
        raise ValueError(f"{text!r} is not a host name or IP address")
    if all(label.isdigit() for label in labels):
        raise ValueError(f"{text!r} is not an IPv4 address")
    return host


def parse(text: str, default_port: int | None = None) -> Address:
    """`host:port`, `[v6]:port`, a scheme in front allowed; `default_port` when there is none."""
    rest = _SCHEME.sub("", text.strip()).removesuffix("/")
    if rest.startswith("["):
        host, bracket, tail = rest.partition("]")
        host += bracket
        if tail and not tail.startswith(":"):
            raise ValueError(f"{text!r} is not host:port")
        port_text = tail[1:] if tail else None
    elif _ip(rest) is not None:
        host, port_text = rest, None
    elif rest.count(":") > 1:
        raise ValueError(f"{text!r}: an IPv6 address with a port needs brackets, [::1]:50051")
    else:
        host, colon, tail = rest.partition(":")
        port_text = tail if colon else None
    if port_text is None:
        if default_port is None:
            raise ValueError(f"{text!r} names no port")
        return Address(parse_host(host), default_port)
    return Address(parse_host(host), parse_port(port_text))


def is_wildcard(host: str) -> bool:
    """Whether binding to it listens on every interface."""
    address = _ip(host.strip("[]"))
    return address is not None and address.is_unspecified


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach it. A name other than localhost is not trusted to."""
    bare = host.strip("[]")
    address = _ip(bare)
    if address is None:
        name = bare.lower().removesuffix(".")
        return name == "localhost" or name.endswith(".localhost")
    if isinstance(address, ipaddress.IPv6Address) and address.ipv4_mapped is not None:
        return address.ipv4_mapped.is_loopback
    return address.is_loopback


def beside(host: str) -> str:
    """What a log line says after the address to dial: where else a server bound to `host` is."""
    return f" and all other addresses of this machine ({host})" if is_wildcard(host) else ""


def loopback_for(host: str) -> str:
    """The host to dial for a server bound to `host`: loopback for a wildcard, else `host`."""
    bare = host.strip("[]")
    if not is_wildcard(bare):
        return bare
    return "::1" if ":" in bare else "127.0.0.1"


def _ip(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
