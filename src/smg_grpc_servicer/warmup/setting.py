"""How much an engine is warmed up: `SMG_<ENGINE>_SERVICER_WARMUP`, for every engine alike."""

from __future__ import annotations

from dataclasses import dataclass

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.parsers import Parser
from smg_grpc_servicer.core.settings import Setting

LEVELS = ("auto", "off", "fast", "full")
_OFF = frozenset({"0", "false", "no", "none"})

SECONDS = {"vllm": 300.0, "sglang": 300.0, "tokenspeed": 900.0}
"""What a warm-up may take when nobody says."""
LONGEST = 10.0**9


@dataclass(frozen=True, slots=True)
class WarmUpBudget:
    """How much is warmed up, and for how long at most."""

    level: str
    """One of LEVELS; `auto` is `full` where that gains anything."""
    seconds: float


def warm_up_setting(engine: str) -> Setting[WarmUpBudget]:
    """Of one engine, named as in its variables."""
    seconds = SECONDS[engine]
    return Setting(
        "warm_up",
        Parser(
            lambda text: _parse(text, seconds),
            "auto, off, fast, full, a number of seconds, or a level and seconds as in fast:20",
            "LEVEL",
            show=_show,
        ),
        WarmUpBudget("auto", seconds),
        "what the engine answers before its first client",
        env=f"SMG_{engine.upper()}_SERVICER_WARMUP",
    )


def _parse(text: str, default: float) -> WarmUpBudget:
    word = text.strip().lower()
    if word in _OFF:
        return WarmUpBudget("off", default)
    level, colon, seconds = word.partition(":")
    if level in LEVELS:
        return WarmUpBudget(level, _seconds(seconds) if colon else default)
    return WarmUpBudget("full", _seconds(word))


def _seconds(text: str) -> float:
    seconds = parsers.POSITIVE_SECONDS(text)
    if seconds > LONGEST:
        raise ValueError(f"more than {LONGEST:g} seconds")
    return seconds


def _show(value: object) -> str:
    assert isinstance(value, WarmUpBudget)
    return f"{value.level}:{value.seconds:g}"
