"""What a vLLM command line comes to for our server."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.options import LOG_LEVEL
from smg_grpc_servicer.core.tls import TlsFiles
from smg_grpc_servicer.vllm.options import Plan, plan


def planned(environ: dict[str, str] | None = None, **given: Any) -> Plan:
    return plan(argparse.Namespace(**{"host": None, "port": 8000, **given}), environ or {})


@pytest.fixture
def pem(tmp_path: Path) -> str:
    """A file that can be read."""
    (tmp_path / "any.pem").touch()
    return str(tmp_path / "any.pem")


def test_the_defaults_are_the_launchers_address_and_our_limits() -> None:
    server = planned().server
    assert (server.host, server.port, server.drain_seconds) == ("0.0.0.0", 8000, 20.0)
    assert server.tls is None
    assert not server.needs_token
    assert planned().security == []


@pytest.mark.parametrize(("host", "kept"), [("::1", "::1"), ("[::1]", "::1"), ("", "0.0.0.0")])
def test_hosts_as_vllm_takes_them(host: str, kept: str) -> None:
    """Q3."""
    assert planned(host=host).server.host == kept


def test_the_variables_of_our_other_servers_addresses_do_not_count() -> None:
    """vLLM has decided on host and port, by its own flags, when we are asked."""
    server = planned({"SMG_SERVICER_HOST": "10.0.0.1", "SMG_SERVICER_PORT": "1"}).server
    assert (server.host, server.port) == ("0.0.0.0", 8000)


def test_our_flags_win_over_variables() -> None:
    environ = {"SMG_SERVICER_DRAIN_SECONDS": "5"}
    assert planned(environ).server.drain_seconds == 5
    assert planned(environ, smg_drain_seconds="6").server.drain_seconds == 6


@pytest.mark.parametrize(
    ("given", "environ", "seconds"),
    [
        ({"shutdown_timeout": 0}, {}, 20),
        ({"shutdown_timeout": 9}, {}, 9),
        ({"shutdown_timeout": 9}, {"SMG_SERVICER_DRAIN_SECONDS": "5"}, 5),
        ({"shutdown_timeout": 9, "smg_drain_seconds": "6"}, {}, 6),
    ],
)
def test_vllms_shutdown_timeout_is_the_drain_unless_ours_is_set(
    given: dict[str, object], environ: dict[str, str], seconds: float
) -> None:
    """V14: the drain was a fixed 5 s."""
    assert planned(environ, **given).server.drain_seconds == seconds


@pytest.mark.parametrize(
    ("given", "environ", "level"),
    [
        ({}, {}, "info"),
        ({"log_level": "DEBUG"}, {}, "debug"),
        ({"log_level": None}, {"VLLM_LOGGING_LEVEL": "WARNING"}, "warning"),
        ({"log_level": "CRITICAL"}, {}, "info"),
        ({"log_level": "DEBUG"}, {"SMG_SERVICER_LOG_LEVEL": "error"}, "error"),
    ],
)
def test_the_level_of_vllms_log_is_ours(
    given: dict[str, object], environ: dict[str, str], level: str
) -> None:
    """T10."""
    assert planned(environ, **given).values.get_value(LOG_LEVEL) == level


@pytest.mark.parametrize(
    ("api_key", "variable", "tokens"),
    [
        (["a", "b"], "c", ("a", "b")),
        ("a", None, ("a",)),
        (None, "c", ("c",)),
        ([], "c", ("c",)),
        ([""], None, ()),
        (None, None, ()),
    ],
)
def test_api_keys_are_bearer_tokens(
    api_key: object, variable: str | None, tokens: tuple[str, ...]
) -> None:
    """Q1: they were accepted and ignored."""
    made = planned({"VLLM_API_KEY": variable} if variable else {}, api_key=api_key)
    assert made.server.auth_tokens == tokens
    assert made.server.needs_token == bool(tokens)
    assert made.security == (["tokens"] if tokens else [])


def test_keys_are_in_no_text() -> None:
    made = planned(api_key=["s3cret"])
    assert "s3cret" not in repr(made)
    assert "s3cret" not in str(made.values.changed())


def test_ssl_files_turn_tls_on(pem: str) -> None:
    made = planned(ssl_certfile=pem, ssl_keyfile=pem, ssl_ca_certs=pem, ssl_cert_reqs=2)
    assert made.server.tls == TlsFiles(Path(pem), Path(pem), Path(pem))
    assert made.security == ["TLS"]


def test_the_key_may_stand_in_the_certificates_file(pem: str) -> None:
    assert planned(ssl_certfile=pem).server.tls == TlsFiles(Path(pem), Path(pem))


def test_our_own_tls_flags_serve_the_launchers_own_parser(pem: str) -> None:
    made = planned(smg_tls_cert=pem, smg_tls_key=pem)
    assert made.server.tls == TlsFiles(Path(pem), Path(pem))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ssl_certfile": "/no"}, "--ssl-certfile: got '/no'"),
        ({"ssl_keyfile": "PEM"}, "--ssl-certfile: not given, but --ssl-keyfile"),
        ({"smg_tls_key": "PEM"}, "--tls-cert: not given, but --tls-key"),
        ({"ssl_certfile": "PEM", "smg_tls_key": "PEM"}, "--tls-key: given beside --ssl-certfile"),
        ({"ssl_certfile": "PEM", "ssl_ca_certs": "PEM"}, "--ssl-cert-reqs: got 0 with"),
        (
            {"ssl_certfile": "PEM", "ssl_ca_certs": "PEM", "ssl_cert_reqs": 1},
            "--ssl-cert-reqs: got 1 with",
        ),
        ({"ssl_certfile": "PEM", "ssl_cert_reqs": 2}, "--ssl-ca-certs: not given, but"),
        ({"ssl_ciphers": "HIGH"}, "--ssl-ciphers: has no effect with --grpc"),
        ({"middleware": ["own.Auth"]}, "--middleware: has no effect with --grpc"),
        ({"uds": "/tmp/x"}, "--uds: not supported with --grpc"),
        ({"smg_servicer_impl": "go"}, "--servicer-impl: got 'go'"),
        ({"smg_mm_max_items": "0"}, "--mm-max-items: got '0'"),
        (
            {"smg_mm_processor": "smg"},
            "--mm-processor: got 'smg', which needs --servicer-impl rust",
        ),
        ({"smg_mm_processor": "redis"}, "--mm-processor: got 'redis', which is not served yet"),
        (
            {"smg_mm_processor": "inprocess", "smg_servicer_impl": "rust"},
            "--mm-processor: got 'inprocess', which is not served yet",
        ),
        ({"port": 70000}, "--port: got '70000'"),
        ({"smg_metrics_port": "8000"}, "--metrics-port: got 8000, which is --port"),
    ],
)
def test_what_cannot_hold_is_refused_by_the_flag_as_written(
    given: dict[str, Any], words: str, pem: str
) -> None:
    """Fail closed: no security flag is taken and then left out."""
    filled: dict[str, Any] = {n: pem if value == "PEM" else value for n, value in given.items()}
    with pytest.raises(ConfigError) as refused:
        planned(None, **filled)
    assert words in str(refused.value)


def test_the_variable_of_the_servicers_kind_is_minded() -> None:
    assert planned({"SMG_VLLM_SERVICER_IMPL": "Rust"}).impl == "rust"
    assert planned({"SMG_VLLM_SERVICER_IMPL": "rust"}, smg_servicer_impl="python").impl == "python"
    with pytest.raises(ConfigError, match="SMG_VLLM_SERVICER_IMPL: got 'go'"):
        planned({"SMG_VLLM_SERVICER_IMPL": "go"})


@pytest.mark.parametrize(
    "variable",
    [
        "SMG_VLLM_SERVICER_KV_EVENTS",
        "SMG_VLLM_SERVICER_WARMUP",
        "SMG_VLLM_SERVICER_METRICS_PORT",
        "SMG_KV_EVENT_HISTORY_BATCHES",
        "SMG_KV_EVENT_HISTORY_BYTES",
    ],
)
def test_a_variable_that_cannot_be_read_is_told_before_anything_loads(variable: str) -> None:
    with pytest.raises(ConfigError, match=f"{variable}: got 'maybe'.*; allowed: "):
        planned({variable: "maybe"})


def test_media_settings_are_checked_whatever_the_processor() -> None:
    """A stale variable that cannot be read fails loudly, not on the day it is needed."""
    with pytest.raises(ConfigError, match="SMG_VLLM_MM_SIDECAR_TIMEOUT_MS: got 'soon'"):
        planned({"SMG_VLLM_MM_SIDECAR_TIMEOUT_MS": "soon"})


def test_media_settings_and_where_the_processor_comes_from() -> None:
    environ = {"SMG_VLLM_MM_PROCESSOR": "SMG", "SMG_VLLM_MM_MAX_ITEM_BYTES": "1024"}
    media = planned(environ, smg_servicer_impl="rust", smg_mm_max_inflight="3").media
    assert (media.processor, media.source, media.max_inflight) == ("smg", "env", 3)
    assert (media.max_items, media.max_item_bytes) == (None, 1024)
    media = planned(environ, smg_servicer_impl="rust", smg_mm_processor="off").media
    assert (media.processor, media.source) == ("off", "flag")
    assert planned().media.source == "default"


def test_the_url_of_redis_is_in_no_text() -> None:
    made = planned(smg_mm_redis_url="redis://:s3cret@host/0")
    assert "s3cret" not in str(made.values.changed())
