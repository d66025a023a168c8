"""The settings of `sglang serve --smg-grpc-mode`: SGLang's own flags, then ours.

SGLang's `--host`, `--port`, `--ssl-*`, `--api-key`, `--log-level` and `--skip-server-warmup` mean
here what they mean there; everything else is a flag that `plugin` puts on SGLang's parser, or a
variable of ours (`SMG_SERVICER_…`). What gRPC has no equal of is a `ConfigError`, and so is what
SGLang's launcher would do in our place.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.options import (
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
from smg_grpc_servicer.warmup.setting import WarmUpBudget, warm_up_setting

SGLANG_EXIT_SECONDS = 20.0
"""The ranks get 10 s to release what they hold; see `processes`."""

SERVICER_IMPL = Setting(
    "servicer_impl",
    parsers.one_of("python"),
    "python",
    "which servicer answers",
    "--servicer-impl",
    "SMG_SGLANG_SERVICER_IMPL",
)

PREFIX = "smg_servicer_"
"""In front of our names in the namespace of SGLang's parser, which has `smg_…` of its own."""

WARM_UP = warm_up_setting("sglang")

_TLS = {TLS_CERT: "ssl_certfile", TLS_KEY: "ssl_keyfile", TLS_CLIENT_CA: "ssl_ca_certs"}
_LAUNCHERS = (LOG_LEVEL, EVENT_LOOP)
"""What the launcher has decided before we are asked."""
_SGLANGS = frozenset({HOST.name, PORT.name, *(setting.name for setting in _TLS)})
"""What SGLang has a flag of its own for."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What a launch was asked for, checked."""

    values: Values
    server: ServerOptions
    skip_warm_up: bool

    @property
    def warm_up(self) -> WarmUpBudget:
        return self.values.get_value(WARM_UP)


def settings(*, flags: bool = True) -> Settings:
    """All of a launch.

    :param flags: ours are on the parser; without it (`plugin` was left out) no fault names them.
    """
    made = []
    for setting in (*server_settings("sglang"), SERVICER_IMPL, WARM_UP, switch("sglang"), *HISTORY):
        if setting.name in _SGLANGS:
            made.append(replace(setting, env=None))  # our variables do not speak into its flags
        elif setting not in _LAUNCHERS:
            made.append(setting if flags else replace(setting, flag=None))
    return Settings(*made)


def flags() -> Settings:
    """Those that become flags of SGLang's parser."""
    ours = (setting for setting in settings() if setting.name not in _SGLANGS)
    return Settings(*(setting for setting in ours if setting.flag is not None))


def plan(
    config: Any,
    environ: Mapping[str, str] | None = None,
    given: Mapping[str, object] | None = None,
) -> Plan:
    """The settings of a launch.

    :param config: SGLang's resolved record (`resolving_view`).
    :param given: our flags, as `plugin.given` has them.
    :raises ConfigError: naming the flags and variables; every fault that can be told.
    """
    env = os.environ if environ is None else environ
    _refuse(config, env)
    written: dict[str, object] = {HOST.name: config.host or None, PORT.name: config.port}
    written |= {setting.name: getattr(config, flag) or None for setting, flag in _TLS.items()}
    try:
        values = settings(flags=given is not None).resolve(written | dict(given or {}), env)
        server = ServerOptions.from_values(values)
    except ConfigError as error:
        raise as_written(error) from None
    key = (config.api_key or "").strip()
    server = replace(
        server, auth_tokens=(key,) if key else (), exit_guard_seconds=SGLANG_EXIT_SECONDS
    )
    return Plan(values, server, bool(config.skip_server_warmup))


def _refuse(config: Any, environ: Mapping[str, str]) -> None:
    faults = []
    if config.ssl_keyfile_password:
        faults.append(
            "--ssl-keyfile-password: gRPC reads no encrypted keys; allowed: a key without one"
        )
    if config.tokenizer_worker_num > 1:
        faults.append(
            f"--tokenizer-worker-num: got {config.tokenizer_worker_num}; allowed with "
            "--smg-grpc-mode: 1, nothing is tokenized here"
        )
    if config.encoder_only:
        faults.append("--encoder-only: SGLang serves an encoder itself, without this package")
    if environ.get("SGLANG_RUST_SERVER", "").strip().lower() in ("1", "true", "yes", "y"):
        faults.append("SGLANG_RUST_SERVER: cannot be set with --smg-grpc-mode")
    if faults:
        raise ConfigError("\n".join(faults))


def as_written(error: ConfigError) -> ConfigError:
    """The same fault, with SGLang's names for the TLS flags."""
    text = str(error)
    for setting, name in _TLS.items():
        text = text.replace(setting.where, "--" + name.replace("_", "-"))
    return ConfigError(text)
