"""What a launch of SGLang's comes to for our server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.tls import TlsFiles
from smg_grpc_servicer.sglang.options import as_written, flags, plan, settings
from tests.support.sglang_config import sglang_config


def planned(environ: dict[str, str] | None = None, **given: Any) -> Any:
    return plan(sglang_config(**given), environ or {})


@pytest.fixture
def pem(tmp_path: Path) -> str:
    """A file that can be read."""
    (tmp_path / "any.pem").touch()
    return str(tmp_path / "any.pem")


def test_sglang_s_address_and_our_limits() -> None:
    asked = planned()
    assert (asked.server.host, asked.server.port) == ("127.0.0.1", 30000)
    assert asked.server.drain_seconds == 20
    assert asked.server.tls is None
    assert not asked.server.needs_token
    assert not asked.skip_warm_up
    assert planned(skip_server_warmup=True).skip_warm_up


def test_our_variables_count_where_sglang_has_no_flag() -> None:
    environ = {
        "SMG_SERVICER_HOST": "10.0.0.1",
        "SMG_SERVICER_PORT": "1",
        "SMG_SERVICER_TLS_CERT": "/nowhere",
        "SMG_SERVICER_DRAIN_SECONDS": "5",
        "SMG_SGLANG_SERVICER_METRICS_PORT": "9100",
    }
    server = planned(environ).server
    assert (server.host, server.port, server.tls) == ("127.0.0.1", 30000, None)
    assert (server.drain_seconds, server.metrics_port) == (5, 9100)


def test_row_31_authorities_ask_for_a_certificate(pem: str) -> None:
    server = planned(ssl_certfile=pem, ssl_keyfile=pem, ssl_ca_certs=pem).server
    assert server.tls == TlsFiles(Path(pem), Path(pem), Path(pem))


def test_an_api_key_is_a_token() -> None:
    assert planned(api_key="k").server.auth_tokens == ("k",)
    assert not planned(api_key=" ").server.needs_token


@pytest.mark.parametrize(
    ("given", "environ", "named"),
    [
        ({"ssl_keyfile_password": "x"}, {}, "--ssl-keyfile-password"),
        ({"tokenizer_worker_num": 2}, {}, "--tokenizer-worker-num: got 2"),
        ({}, {"SGLANG_RUST_SERVER": "true"}, "SGLANG_RUST_SERVER"),
        ({"encoder_only": True}, {}, "--encoder-only"),
        ({"ssl_keyfile": __file__}, {}, "--ssl-certfile: not given, but --ssl-keyfile"),
        ({"ssl_certfile": "/nowhere"}, {}, "--ssl-certfile: got '/nowhere'"),
        ({}, {"SMG_SGLANG_SERVICER_IMPL": "rust"}, "SMG_SGLANG_SERVICER_IMPL: got 'rust'"),
        ({}, {"SMG_SERVICER_DRAIN_SECONDS": "soon"}, "SMG_SERVICER_DRAIN_SECONDS: got 'soon'"),
        ({}, {"SMG_SERVICER_LOG_FORMAT": "xml"}, "SMG_SERVICER_LOG_FORMAT: got 'xml'"),
        ({}, {"SMG_SGLANG_SERVICER_KV_EVENTS": "of"}, "SMG_SGLANG_SERVICER_KV_EVENTS: got 'of'"),
        ({}, {"SMG_KV_EVENT_HISTORY_BYTES": "y"}, "SMG_KV_EVENT_HISTORY_BYTES: got 'y'"),
    ],
)
def test_what_cannot_work_is_told_by_its_name(
    given: dict[str, Any], environ: dict[str, str], named: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        planned(environ, **given)
    assert named in str(refused.value)
    assert "x" not in str(refused.value).split()


def test_no_fault_names_a_flag_that_sglang_does_not_know() -> None:
    """Somebody may leave our plugin out of SGLANG_PLUGINS, or call `serve_grpc` themselves."""
    theirs = {"--host", "--port", "--tls-cert", "--tls-key", "--tls-client-ca"}
    assert {setting.flag for setting in settings(flags=False)} - {None} == theirs
    assert str(as_written(ConfigError("--tls-cert, --tls-key: got"))) == (
        "--ssl-certfile, --ssl-keyfile: got"
    )


def test_our_flags_are_those_that_sglang_has_no_word_for() -> None:
    found = {setting.flag for setting in flags()}
    assert {"--drain-seconds", "--auth-token-file", "--servicer-impl", "--log-format"} <= found
    assert not found & {None, "--host", "--port", "--tls-cert", "--log-level", "--event-loop"}


def test_a_flag_wins_over_its_variable_and_is_named_in_its_fault() -> None:
    environ = {"SMG_SERVICER_DRAIN_SECONDS": "5"}
    asked = plan(sglang_config(), environ, {"drain_seconds": "7", "reflection": False})
    assert (asked.server.drain_seconds, asked.server.reflection) == (7, False)
    with pytest.raises(ConfigError, match="--drain-seconds: got 'soon'"):
        plan(sglang_config(), environ, {"drain_seconds": "soon"})
