"""The variables of the Rust path, `SMG_<ENGINE>_SERVICER_*`, read and checked together.

Durations are seconds. `resolve` raises one `ConfigError` that names every variable that cannot
work; nothing is bound or made before that.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.parsers import Parser
from smg_grpc_servicer.core.settings import Setting, Settings

Number = TypeVar("Number", int, float)


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
    socket_dir: Path | None = None
    """None: `socket_dir.default()`."""
    worker_threads: int | None = None
    """Of the Rust server, which reads the variable itself."""
    asked: Mapping[str, str] = field(default_factory=dict)
    """Field → the variable that set it, for those that somebody set."""


def _at_most(most: int, parser: Parser[Number]) -> Parser[Number]:
    """The wheel keeps these in types of fixed size, and would name them by its own names."""

    def parse(text: str) -> Number:
        value = parser(text)
        if value > most:
            raise ValueError
        return value

    return replace(parser, parse=parse, allowed=f"{parser.allowed}, at most {most}")


_SECONDS = _at_most(10**9, parsers.SECONDS)
_POSITIVE_SECONDS = _at_most(10**9, parsers.POSITIVE_SECONDS)


def resolve(engine: str, environ: Mapping[str, str] | None = None) -> RustKnobs:
    """The knobs of `engine` from the environment.

    :raises ConfigError: naming every variable that cannot work.
    """
    values = Settings(*_settings(engine)).resolve(environ=environ)
    asked = {
        name: values.sources[name].removeprefix("env ")
        for name in values
        if values.sources[name] != "default"
    }
    return RustKnobs(**values, asked=asked)  # type: ignore[arg-type]


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
            _SECONDS,
            5.0,
            "how long running requests may go on after SIGTERM",
            env=f"{prefix}_DRAIN_SECS",
        ),
        Setting(
            "startup_seconds",
            _POSITIVE_SECONDS,
            1800.0,
            "how long a starting engine may show no sign of life",
            env=f"{prefix}_STARTUP_TIMEOUT_SECS",
        ),
        Setting(
            "startup_ceiling_seconds",
            _SECONDS,
            14400.0,
            "how long a start may take in all; 0 = no bound",
            env=f"{prefix}_STARTUP_CEILING_SECS",
        ),
        Setting(
            "silence_seconds",
            _POSITIVE_SECONDS,
            300.0,
            "how long a connected engine with requests in flight may be silent",
            env=f"{prefix}_SILENCE_TIMEOUT_SECS",
        ),
        Setting(
            "prefill_tokens_per_second",
            _at_most(10**9, parsers.COUNT),
            2000,
            "the pace at which long prompts extend that silence; 0 = they do not",
            env=f"{prefix}_PREFILL_TOKENS_PER_SEC",
        ),
        Setting(
            "socket_dir",
            FOLDER,
            None,
            "private folder of the sockets between server and engine",
            env="SMG_ZMQ_SOCKET_DIR",
        ),
        Setting(
            "worker_threads",
            _at_most(1024, parsers.POSITIVE_INT),
            None,
            "threads of the Rust server",
            env="SMG_SERVICER_WORKER_THREADS",
        ),
    )


def _folder(text: str) -> Path:
    try:
        return Path(text.strip()).expanduser()
    except RuntimeError as error:  # ~ of a user that is not there
        raise ValueError(str(error)) from None


FOLDER = Parser(_folder, "a path", "DIR")
