from __future__ import annotations

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.kv_events.endpoints import parse, source


@pytest.mark.parametrize(
    ("configured", "rank", "live", "bind"),
    [
        ("tcp://*:5557", 0, "tcp://127.0.0.1:5557", False),
        ("tcp://*:5557", 3, "tcp://127.0.0.1:5560", False),
        ("tcp://[::]:5557", 1, "tcp://[::1]:5558", False),
        ("tcp://[fe80::1]:5557", 0, "tcp://[fe80::1]:5557", False),
        ("tcp://10.0.0.0:5557", 0, "tcp://10.0.0.0:5557", True),
        ("tcp://127.0.0.1:5557", 2, "tcp://127.0.0.1:5559", True),
        ("tcp://0.0.0.0:5557", 0, "tcp://127.0.0.1:5557", True),
        ("tcp://node-1:5557", 0, "tcp://node-1:5557", True),
        ("ipc:///tmp/a*b", 0, "ipc:///tmp/a*b", False),
        ("inproc://cache", 0, "inproc://cache", False),
        ("inproc://cache", 2, "inproc://cache_dp2", False),
    ],
)
def test_who_binds_and_where_a_rank_is(configured: str, rank: int, live: str, bind: bool) -> None:
    """D1, D7: by structure; an address that only contains zeros is not a wildcard."""
    made = source(rank, configured, None)
    assert str(made.live) == live
    assert made.bind is bind


def test_sglang_binds_a_wildcard_of_ipv4() -> None:
    made = source(1, "tcp://0.0.0.0:5557", "tcp://0.0.0.0:6000", ipv4_wildcard=True)
    assert (str(made.live), made.bind) == ("tcp://127.0.0.1:5558", False)
    assert str(made.replay) == "tcp://127.0.0.1:6001"


def test_what_an_engine_reports_is_not_offset_again() -> None:
    made = source(3, "tcp://10.1.2.3:40001", None, resolved=True, binds=True)
    assert (str(made.live), made.bind) == ("tcp://10.1.2.3:40001", False)


@pytest.mark.parametrize(
    ("text", "rank", "complaint"),
    [
        ("tcp://*", 0, "names no host"),
        ("tcp://*:*", 0, "port from 1 to 65535"),
        ("tcp://*:0", 0, "port from 1 to 65535"),
        ("udp://a:1", 0, "allowed: tcp"),
        ("5557", 0, "allowed: tcp"),
        ("ipc:///tmp/x", 1, "with several ranks"),
        ("tcp://*:65535", 1, "no port for rank 1"),
    ],
)
def test_an_endpoint_that_cannot_work_is_named(text: str, rank: int, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint) as caught:
        source(rank, text, None)
    assert "--kv-events-config: endpoint" in str(caught.value)


def test_a_replay_endpoint_is_named_as_such() -> None:
    with pytest.raises(ConfigError, match="replay_endpoint"):
        source(0, "tcp://*:5557", "tcp://*:none")


def test_an_endpoint_is_written_as_it_was() -> None:
    for text in ("tcp://[::1]:5", "tcp://a.b:65535", "ipc://@x", "inproc://y"):
        assert str(parse(text, where="x")) == text
