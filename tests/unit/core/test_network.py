from __future__ import annotations

import ipaddress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.core.network import (
    Address,
    is_loopback,
    is_wildcard,
    join,
    loopback_for,
    parse,
    parse_host,
    parse_port,
)


@pytest.mark.parametrize(
    ("text", "address", "written"),
    [
        ("127.0.0.1:50051", Address("127.0.0.1", 50051), "127.0.0.1:50051"),
        ("[::1]:50051", Address("::1", 50051), "[::1]:50051"),
        ("[fe80::1%eth0]:1", Address("fe80::1%eth0", 1), "[fe80::1%eth0]:1"),
        ("worker-0.svc.cluster.local:80", Address("worker-0.svc.cluster.local", 80), None),
        ("grpc://localhost:9", Address("localhost", 9), "localhost:9"),
        ("grpcs://[::]:9/", Address("::", 9), "[::]:9"),
        ("tcp://10.0.0.1:29501", Address("10.0.0.1", 29501), "10.0.0.1:29501"),
    ],
)
def test_parse_and_write(text: str, address: Address, written: str | None) -> None:
    """Q3: every form of host and port that launchers and URLs use."""
    assert parse(text) == address
    assert str(address) == (written or text)


@pytest.mark.parametrize("text", ["::1", "[::1]", "10.0.0.1", "name"])
def test_parse_with_a_default_port(text: str) -> None:
    assert parse(text, 7).port == 7
    with pytest.raises(ValueError, match="names no port"):
        parse(text)


@pytest.mark.parametrize(
    "text", ["", ":5", "a b:5", "::1:50051:x", "1.2.3:5", "1.2.3.4.5:5", "[::1]5", "[::1", "h:",
             "h:x", "h:65536", "h:-1", "h:٣", "-x:5", "[name]:5", "h:1:2"],
)  # fmt: skip
def test_parse_refuses(text: str) -> None:
    with pytest.raises(ValueError, match=r"."):
        parse(text)


def test_no_port_is_guessed_out_of_an_ipv6_literal() -> None:
    """Q3: `::1:5005` is an IPv6 address as it stands; `::1:50051` is none and needs brackets."""
    assert parse("::1:5005", 7) == Address("::1:5005", 7)
    with pytest.raises(ValueError, match=r"needs brackets, \[::1\]:50051"):
        parse("::1:50051", 7)


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_ip_survives_a_round_trip(
    ip: ipaddress.IPv4Address | ipaddress.IPv6Address, port: int
) -> None:
    address = Address(str(ip), port)
    assert parse(str(address)) == address
    assert parse_host(f"[{ip}]" if ip.version == 6 else str(ip)) == str(ip)


@given(st.text(max_size=20))
def test_parse_fails_only_with_value_error(text: str) -> None:
    try:
        address = parse(text, 1)
    except ValueError:
        return
    assert parse(str(address)) == address


@pytest.mark.parametrize(
    ("host", "wildcard", "loopback", "dial"),
    [
        ("0.0.0.0", True, False, "127.0.0.1"),
        ("::", True, False, "::1"),
        ("[::]", True, False, "::1"),
        ("127.0.0.1", False, True, "127.0.0.1"),
        ("127.8.8.8", False, True, "127.8.8.8"),
        ("::1", False, True, "::1"),
        ("[::1]", False, True, "::1"),
        ("::ffff:127.0.0.1", False, True, "::ffff:127.0.0.1"),
        ("::ffff:10.0.0.1", False, False, "::ffff:10.0.0.1"),
        ("localhost", False, True, "localhost"),
        ("LOCALHOST.", False, True, "LOCALHOST."),
        ("localhost.example.com", False, False, "localhost.example.com"),
        ("10.0.0.1", False, False, "10.0.0.1"),
    ],
)
def test_kinds_of_host(host: str, wildcard: bool, loopback: bool, dial: str) -> None:
    """Q3, V12: what is open to others, and what to dial for it."""
    assert is_wildcard(host) is wildcard
    assert is_loopback(host) is loopback
    assert loopback_for(host) == dial


def test_join_brackets_once() -> None:
    assert join("::1", 5) == join("[::1]", 5) == "[::1]:5"
    assert join("name", 5) == "name:5"


def test_dialable() -> None:
    assert str(Address("::", 5).dialable) == "[::1]:5"


@pytest.mark.parametrize("text", ["+5", " 5", "5 ", "1_0", "", "x", "65536"])
def test_a_port_is_plain_digits(text: str) -> None:
    with pytest.raises(ValueError, match="port number"):
        parse_port(text)
