"""The variables of the Rust path, `SMG_<ENGINE>_SERVICER_*`, read and checked together.

Durations are seconds. `resolve` raises one `ConfigError` that names every variable that cannot
work; nothing is bound or made before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.parsers import Parser
from smg_grpc_servicer.core.settings import Setting, Settings, Values

LEVELS = ("off", "fast", "full")
_OFF = frozenset({"0", "false", "no", "none"})


@dataclass(frozen=True, slots=True)
class WarmUpBudget:
    """How much is warmed up, and for how long at most."""

    level: str = "full"
    """One of LEVELS."""
    seconds: float | None = None
    """None: the engine's own default."""


@dataclass(frozen=True, slots=True)
class RustKnobs:
    """The values in force; the defaults are the published package's."""

    handshake_port: int = 0
    """0: any free one."""
    drain_seconds: float = 5.0
    startup_seconds: float = 1800.0
    """Of a starting engine's silence."""
    startup_ceiling_seconds: float = 14400.0
    """Of a start in all; 0 is none."""
    silence_seconds: float = 300.0
    """Of a connected engine with requests in flight."""
    prefill_tokens_per_second: int = 2000
    """Long prompts extend that silence at this pace; 0 does not."""
    kv_events: bool = True
    """Turn the engine's publisher on when its own flags do not say."""
    warm_up: WarmUpBudget = WarmUpBudget()
    socket_dir: Path | None = None
    """None: `socket_dir.default()`."""
    worker_threads: int | None = None
    """Of the Rust server, which reads the variable itself."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Field → the variable that set it, for those that somebody set."""


def settings(engine: str) -> Settings:
    """The variables of one engine, to be resolved with others or alone."""
    return Settings(*_settings(engine))


def from_values(values: Values) -> RustKnobs:
    """What they came to. `values` may hold other settings too."""
    known = RustKnobs.__dataclass_fields__
    mine = {name: value for name, value in values.items() if name in known}
    asked = {
        name: values.sources[name].removeprefix("env ")
        for name in mine
        if values.sources[name] != "default"
    }
    return RustKnobs(**mine, asked=asked)  # type: ignore[arg-type]


def resolve(engine: str, environ: Mapping[str, str] | None = None) -> RustKnobs:
    """The knobs of `engine` from the environment.

    :raises ConfigError: naming every variable that cannot work.
    """
    return from_values(settings(engine).resolve(environ=environ))


def _settings(engine: str) -> tuple[Setting[Any], ...]:
    prefix = f"SMG_{engine.upper()}_SERVICER"
    return (
        Setting(
            "handshake_port",
            parsers.PORT,
            0,
            "port of the engine's handshake on 127.0.0.1; 0 takes a free one",
            env=f"{prefix}_HANDSHAKE_PORT",
        ),
        Setting(
            "drain_seconds",
            parsers.SECONDS,
            5.0,
            "how long running requests may go on after SIGTERM",
            env=f"{prefix}_DRAIN_SECS",
        ),
        Setting(
            "startup_seconds",
            parsers.POSITIVE_SECONDS,
            1800.0,
            "how long a starting engine may show no sign of life",
            env=f"{prefix}_STARTUP_TIMEOUT_SECS",
        ),
        Setting(
            "startup_ceiling_seconds",
            parsers.SECONDS,
            14400.0,
            "how long a start may take in all; 0 = no bound",
            env=f"{prefix}_STARTUP_CEILING_SECS",
        ),
        Setting(
            "silence_seconds",
            parsers.POSITIVE_SECONDS,
            300.0,
            "how long a connected engine with requests in flight may be silent",
            env=f"{prefix}_SILENCE_TIMEOUT_SECS",
        ),
        Setting(
            "prefill_tokens_per_second",
            parsers.COUNT,
            2000,
            "the pace at which long prompts extend that silence; 0 = they do not",
            env=f"{prefix}_PREFILL_TOKENS_PER_SEC",
        ),
        Setting(
            "kv_events",
            parsers.BOOLEAN,
            True,
            "publish KV events when the engine's own flags do not say",
            env=f"{prefix}_KV_EVENTS",
        ),
        Setting(
            "warm_up",
            WARM_UP,
            WarmUpBudget(),
            "how much is warmed up before the first request",
            env=f"{prefix}_WARMUP",
        ),
        Setting(
            "socket_dir",
            PATH,
            None,
            "private folder of the sockets between server and engine",
            env="SMG_ZMQ_SOCKET_DIR",
        ),
        Setting(
            "worker_threads",
            parsers.POSITIVE_INT,
            None,
            "threads of the Rust server",
            env="SMG_SERVICER_WORKER_THREADS",
        ),
    )


def _warm_up(text: str) -> WarmUpBudget:
    word = text.strip().lower()
    if word in _OFF:
        return WarmUpBudget("off")
    level, colon, seconds = word.partition(":")
    if level in LEVELS:
        return WarmUpBudget(level, parsers.POSITIVE_SECONDS(seconds) if colon else None)
    return WarmUpBudget("full", parsers.POSITIVE_SECONDS(word))


def _show_warm_up(value: object) -> str:
    assert isinstance(value, WarmUpBudget)
    return value.level if value.seconds is None else f"{value.level}:{value.seconds:g}"


WARM_UP = Parser(
    _warm_up,
    "off, fast, full, seconds of at most so much, or LEVEL:SECONDS",
    "LEVEL",
    show=_show_warm_up,
)
PATH = Parser(lambda text: Path(text.strip()).expanduser(), "a path", "DIR")
