"""`SMG_<ENGINE>_SERVICER_WARMUP`, read by every wing alike."""

from __future__ import annotations

import argparse

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.settings import Settings
from smg_grpc_servicer.sglang import options as sglang
from smg_grpc_servicer.vllm import options as vllm
from smg_grpc_servicer.warmup.setting import WarmUpBudget, warm_up_setting
from tests.support.sglang_config import sglang_config


def read(engine: str, text: str | None) -> WarmUpBudget:
    setting = warm_up_setting(engine)
    environ = {} if text is None else {f"SMG_{engine.upper()}_SERVICER_WARMUP": text}
    return Settings(setting).resolve(environ=environ).get_value(setting)


@pytest.mark.parametrize(
    ("text", "level", "seconds"),
    [
        (None, "auto", 300),
        (" ", "auto", 300),
        ("off", "off", 300),
        ("0", "off", 300),
        ("None", "off", 300),
        ("fast", "fast", 300),
        (" FULL ", "full", 300),
        ("90", "full", 90),
        ("fast:1.5", "fast", 1.5),
        ("auto:20", "auto", 20),
    ],
)
def test_what_it_says(text: str | None, level: str, seconds: float) -> None:
    assert read("vllm", text) == WarmUpBudget(level, seconds)


def test_an_engine_of_many_processes_has_longer() -> None:
    assert read("tokenspeed", None) == WarmUpBudget("auto", 900)
    assert read("tokenspeed", "fast") == WarmUpBudget("fast", 900)


@pytest.mark.parametrize(
    "text", ["hot", "fast:", "fast:0", "full:-1", "inf", "nan", "warm:3", "full:1e300"]
)
def test_what_it_cannot_say(text: str) -> None:
    with pytest.raises(ConfigError) as told:
        read("vllm", text)
    (line,) = str(told.value).splitlines()
    assert line.startswith(f"SMG_VLLM_SERVICER_WARMUP: got {text!r}")
    assert line.endswith(
        "allowed: auto, off, fast, full, a number of seconds, or a level and seconds as in fast:20"
    )


def test_it_is_shown_as_it_is_written() -> None:
    setting = warm_up_setting("vllm")
    assert setting.show(WarmUpBudget("fast", 1.5)) == "fast:1.5"
    assert read("vllm", setting.show(setting.default)) == setting.default


def test_a_launch_of_vllms_is_refused_for_it() -> None:
    """Before anything is bound or loaded, whoever serves."""
    for impl in ("python", "rust"):
        args = argparse.Namespace(**{vllm.PREFIX + "servicer_impl": impl})
        assert vllm.plan(args, {"SMG_VLLM_SERVICER_WARMUP": "7"}).warm_up.seconds == 7
        with pytest.raises(ConfigError, match=r"^SMG_VLLM_SERVICER_WARMUP: got 'hot'"):
            vllm.plan(args, {"SMG_VLLM_SERVICER_WARMUP": "hot"})


def test_a_launch_of_sglangs_is_refused_for_it() -> None:
    assert sglang.plan(sglang_config(), {"SMG_SGLANG_SERVICER_WARMUP": "7"}).warm_up.seconds == 7
    with pytest.raises(ConfigError, match=r"^SMG_SGLANG_SERVICER_WARMUP: got 'hot'"):
        sglang.plan(sglang_config(), {"SMG_SGLANG_SERVICER_WARMUP": "hot"})
