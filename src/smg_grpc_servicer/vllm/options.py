"""The settings of `vllm serve --grpc` beside vLLM's own, and what both come to.

Our flags are added to vLLM's parser under names of ours (`PREFIX`), and only those that were given
are in the namespace. vLLM's flags that its launcher ignores with `--grpc` are honoured or refused:
`--ssl-*` and `--api-key` (or VLLM_API_KEY) are, what gRPC has no equal of is a `ConfigError`.
"""

from __future__ import annotations

import argparse
import os
import ssl
from collections.abc import Mapping
from dataclasses import dataclass, replace

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.options import (
    DRAIN_SECONDS,
    EVENT_LOOP,
    HOST,
    LOG_LEVEL,
    PORT,
    TLS_CERT,
    TLS_CLIENT_CA,
    TLS_KEY,
    ServerOptions,
    server_settings,
)
from smg_grpc_servicer.core.settings import Setting, Settings, Values
from smg_grpc_servicer.kv_events.settings import HISTORY, switch
from smg_grpc_servicer.vllm import impl, media_options
from smg_grpc_servicer.vllm.media_options import MediaOptions
from smg_grpc_servicer.warmup.setting import WarmUpBudget, warm_up_setting

PREFIX = "smg_"
"""In front of our names in vLLM's namespace, where for example `log_level` is vLLM's own."""

VLLM_EXIT_SECONDS = 20.0
"""vLLM gives its engine 5 s to end, on ROCm 15, and its own process takes 3 more."""

SERVICER_IMPL = Setting(
    "servicer_impl",
    parsers.one_of(*impl.CHOICES),
    impl.PYTHON,
    "which servicer answers; rust needs the wheel smg",
    impl.FLAG,
    impl.VARIABLE,
)

WARM_UP = warm_up_setting("vllm")

_HOST = replace(HOST, default="0.0.0.0", env=None)  # noqa: S104 - the launcher's own default
_PORT = replace(PORT, env=None)
_VLLMS = {HOST.name, PORT.name, LOG_LEVEL.name, EVENT_LOOP.name}
"""What vLLM has a flag of its own for, or decides before we are asked."""

_SSL = {
    TLS_CLIENT_CA: "ssl_ca_certs",
    TLS_CERT: "ssl_certfile",
    TLS_KEY: "ssl_keyfile",
}


_DRAIN = replace(
    DRAIN_SECONDS,
    help=f"{DRAIN_SECONDS.help}; with --servicer-impl rust 5 when not set, and "
    "SMG_VLLM_SERVICER_DRAIN_SECS is heard too",
)


@dataclass(frozen=True, slots=True)
class Plan:
    """What a launch was asked for, checked."""

    values: Values
    server: ServerOptions
    media: MediaOptions

    @property
    def impl(self) -> str:
        """`python` or `rust`."""
        return self.values.get_value(SERVICER_IMPL)

    @property
    def warm_up(self) -> WarmUpBudget:
        return self.values.get_value(WARM_UP)

    @property
    def security(self) -> list[str]:
        """What vLLM's own server would not do, in words; empty when nothing was asked for."""
        asked = []
        if self.server.tls is not None:
            asked.append("TLS")
        if self.server.needs_token:
            asked.append("tokens")
        return asked


def flags() -> Settings:
    """The settings that become flags of vLLM's parser."""
    ours = [s for s in server_settings("vllm") if s.name not in _VLLMS]
    ours[ours.index(DRAIN_SECONDS)] = _DRAIN
    return Settings(*ours, SERVICER_IMPL) + media_options.SETTINGS


def plan(args: argparse.Namespace, environ: Mapping[str, str] | None = None) -> Plan:
    """The settings of a parsed vLLM command line.

    :raises ConfigError: naming the flags as they were written; every fault that can be told.
    """
    env = os.environ if environ is None else environ
    given = vars(args)
    _refuse_what_grpc_lacks(given)
    own = {
        setting.name: given[PREFIX + setting.name]
        for setting in flags()
        if PREFIX + setting.name in given
    }
    own |= {"host": given.get("host") or None, "port": given.get("port")}
    tls = _tls(given, own)
    try:
        values = _settings(given, env).resolve(own | tls, env)
        server = ServerOptions.from_values(values)
    except ConfigError as error:
        raise as_written(error, args) from None
    server = replace(server, auth_tokens=_keys(given, env), exit_guard_seconds=VLLM_EXIT_SECONDS)
    media = MediaOptions.from_values(values)
    media.require_served(values.get_value(SERVICER_IMPL))
    return Plan(values, server, media)


def as_written(error: ConfigError, args: argparse.Namespace) -> ConfigError:
    """The same fault, with `--ssl-*` in place of `--tls-*` where that is what was given."""
    text = str(error)
    if any(vars(args).get(name) for name in _SSL.values()):
        for setting, name in _SSL.items():
            text = text.replace(setting.where, _flag(name))
    return ConfigError(text)


def _settings(given: Mapping[str, object], environ: Mapping[str, str]) -> Settings:
    """All settings, with vLLM's own where it has one that means the same."""
    all_of_them = (*server_settings("vllm"), *flags(), WARM_UP, switch("vllm"), *HISTORY)
    settings = {s.name: s for s in all_of_them} | {"host": _HOST, "port": _PORT}
    level = str(given.get("log_level") or environ.get("VLLM_LOGGING_LEVEL") or "").lower()
    if level in ("debug", "info", "warning", "error"):
        settings[LOG_LEVEL.name] = replace(LOG_LEVEL, default=level)
    seconds = given.get("shutdown_timeout")
    if isinstance(seconds, (int, float)) and seconds > 0:
        settings[DRAIN_SECONDS.name] = replace(DRAIN_SECONDS, default=float(seconds))
    return Settings(*settings.values())


def _tls(given: Mapping[str, object], own: Mapping[str, object]) -> dict[str, object]:
    """vLLM's `--ssl-*` as our TLS settings; the key may stand in the certificate's file."""
    files = {setting: given.get(name) for setting, name in _SSL.items() if given.get(name)}
    twice = [s.flag for s in _SSL if s.name in own and s.flag is not None]
    if files and twice:
        written = ", ".join(_flag(_SSL[setting]) for setting in files)
        raise ConfigError(f"{', '.join(twice)}: given beside {written}; allowed: one kind of them")
    if TLS_CERT in files:
        files.setdefault(TLS_KEY, files[TLS_CERT])
    return {setting.name: path for setting, path in files.items()}


def _refuse_what_grpc_lacks(given: Mapping[str, object]) -> None:
    faults = []
    client_ca, needed = given.get("ssl_ca_certs"), given.get("ssl_cert_reqs") or 0
    if client_ca and needed != ssl.CERT_REQUIRED:
        faults.append(
            f"--ssl-cert-reqs: got {needed!r} with --ssl-ca-certs; allowed with --grpc: 2, clients "
            "have to show a certificate"
        )
    if needed != 0 and not client_ca:
        faults.append(f"--ssl-ca-certs: not given, but --ssl-cert-reqs is {needed!r}")
    if given.get("ssl_ciphers"):
        faults.append(
            "--ssl-ciphers: has no effect with --grpc; set the variable GRPC_SSL_CIPHER_SUITES"
        )
    if given.get("middleware"):
        faults.append(
            "--middleware: has no effect with --grpc; allowed: --api-key, --auth-token-file or a "
            "client certificate to keep others out"
        )
    if given.get("uds"):
        faults.append("--uds: not supported with --grpc; allowed: --host and --port")
    if faults:
        raise ConfigError("\n".join(faults))


def _keys(given: Mapping[str, object], environ: Mapping[str, str]) -> tuple[str, ...]:
    """`--api-key`, one or several, else VLLM_API_KEY: which of them holds is vLLM's own rule."""
    keys = given.get("api_key") or environ.get("VLLM_API_KEY") or ()
    if isinstance(keys, str):
        keys = (keys,)
    assert isinstance(keys, (list, tuple))
    return tuple(key.strip() for key in map(str, keys) if key.strip())


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
