from __future__ import annotations

import argparse
from pathlib import Path

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.options import METRICS_PORT, PORT, ServerOptions, server_settings


def options(
    arguments: list[str], env: dict[str, str] | None = None, engine: str = "mlx"
) -> ServerOptions:
    settings = server_settings(engine)
    parser = argparse.ArgumentParser()
    settings.add_to(parser)
    return ServerOptions.from_values(settings.resolve(parser.parse_args(arguments), env or {}))


def test_defaults_are_those_of_the_dataclass_but_the_port() -> None:
    """A test server takes any free port, a person's the documented one."""
    assert options([]) == ServerOptions(port=PORT.default)
    assert options([]).host == "127.0.0.1"
    # Kubernetes kills after 30 s: the drain and what follows it have to fit.
    assert options([]).drain_seconds + options([]).exit_guard_seconds < 30


def test_each_flag_has_its_variable() -> None:
    settings = server_settings("sglang")
    for setting in settings:
        assert setting.flag == "--" + setting.name.replace("_", "-")
        engine = "SMG_SGLANG_SERVICER_" if setting.name.startswith("metrics") else "SMG_SERVICER_"
        assert setting.env == engine + setting.name.upper()
    assert METRICS_PORT.env is None


def test_metrics_variables_carry_the_engine() -> None:
    assert options([], {"SMG_MLX_SERVICER_METRICS_PORT": "9"}).metrics_port == 9
    assert options([], {"SMG_MLX_SERVICER_METRICS_PORT": "9"}, "vllm").metrics_port is None


def test_contradictions_are_told_together(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.touch()
    with pytest.raises(ConfigError, match=r".") as error:
        options(["--tls-key", str(key), "--port", "5", "--metrics-port", "5"])
    assert str(error.value).splitlines() == [
        "--tls-cert: not given, but --tls-key or --tls-client-ca is",
        "--metrics-port: got 5, which is --port; allowed: another port",
    ]
    with pytest.raises(ConfigError, match="--tls-key: not given"):
        options(["--tls-cert", str(key)])


def test_two_free_ports_do_not_clash() -> None:
    assert options(["--port", "0", "--metrics-port", "0"]).metrics_port == 0


@pytest.mark.parametrize("flag", ["--max-message-bytes", "--max-concurrent-rpcs"])
def test_what_grpc_keeps_in_a_c_int_has_its_bound(flag: str) -> None:
    """gRPC would raise an OverflowError that names nothing."""
    name = flag[2:].replace("-", "_")
    assert server_settings("mlx").resolve({name: "2147483647"}, {})[name] == 2**31 - 1
    for text in ("2147483648", "9999999999", "9" * 30):
        with pytest.raises(ConfigError, match=f"{flag}: got '{text}'; allowed: .*2147483647"):
            options([flag, text])


def test_a_servers_own_message_limit_is_its_default() -> None:
    settings = server_settings("mlx", max_message_bytes=2**25)
    assert ServerOptions.from_values(settings.resolve({}, {})).max_receive_bytes == 2**25
    given = settings.resolve({"max_message_bytes": "64MiB"}, {})
    assert ServerOptions.from_values(given).max_receive_bytes == 2**26
    assert options([]).max_receive_bytes == 512 * 2**20


def test_a_service_link_is_neither_port(caplog: pytest.LogCaptureFixture) -> None:
    """Services named `smg-servicer` and `smg-mlx-servicer-metrics` in the pod's namespace."""
    link = "tcp://10.96.0.7:9100"
    env = {"SMG_SERVICER_PORT": link, "SMG_MLX_SERVICER_METRICS_PORT": link}
    assert options([], env) == ServerOptions(port=PORT.default)
    assert [text.partition("=")[0] for text in caplog.messages] == list(env)
