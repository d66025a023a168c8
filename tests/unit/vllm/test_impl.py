"""Which servicer answers: flag over variable over python, and nobody is served by the wrong one."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from smg_grpc_servicer import vllm
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.vllm.impl import VARIABLE, require_python, resolve_servicer_impl
from smg_grpc_servicer.vllm.servicer import VllmEngineServicer
from tests.support.vllm_config import vllm_config


@pytest.mark.parametrize(
    ("given", "variable", "chosen", "after"),
    [
        ({}, None, "python", None),
        ({}, "rust", "rust", "rust"),
        ({}, " RUST ", "rust", " RUST "),
        ({}, "  ", "python", "  "),
        ({"smg_servicer_impl": "rust"}, None, "rust", "rust"),
        ({"smg_servicer_impl": "Python"}, "rust", "python", "python"),
        ({"servicer_impl": "rust"}, "python", "rust", "rust"),
        ({"servicer_impl": None}, "rust", "rust", "rust"),
    ],
)
def test_the_flag_wins_and_is_written_into_the_variable(
    given: dict[str, Any], variable: str | None, chosen: str, after: str | None
) -> None:
    environ = {} if variable is None else {VARIABLE: variable}
    assert resolve_servicer_impl(argparse.Namespace(**given), environ) == chosen
    assert environ.get(VARIABLE) == after


def test_the_package_has_it_and_it_needs_no_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, "rust")
    assert vllm.resolve_servicer_impl() == "rust"


@pytest.mark.parametrize(
    ("given", "environ", "words"),
    [
        (
            {"smg_servicer_impl": "go"},
            {},
            "--servicer-impl: got 'go'; allowed: one of python, rust",
        ),
        ({}, {VARIABLE: "go"}, "SMG_VLLM_SERVICER_IMPL: got 'go'; allowed: one of python, rust"),
    ],
)
def test_another_word_is_a_configuration_error(
    given: dict[str, Any], environ: dict[str, str], words: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        resolve_servicer_impl(argparse.Namespace(**given), environ)
    assert str(refused.value) == words


def test_the_python_servicer_is_not_built_in_the_place_of_rust(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A launcher that never asked would report Rust and serve Python."""
    monkeypatch.setenv(VARIABLE, "Rust")
    with pytest.raises(RuntimeError, match="SMG_VLLM_SERVICER_IMPL=rust, but the Python servicer"):
        VllmEngineServicer(vllm_config(), 0.0)
    require_python({VARIABLE: "python"})
    require_python({})
