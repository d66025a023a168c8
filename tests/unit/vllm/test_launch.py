"""`vllm serve --grpc` that cannot begin."""

from __future__ import annotations

import argparse
from types import FunctionType

import pytest

from smg_grpc_servicer.vllm import launch

FUNCTION = FunctionType((lambda: None).__code__, {})
"""Stands for the launcher's own server, which is not asked."""


async def test_a_wrong_setting_is_one_line_and_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The way out does not take vLLM's modules apart, which lasts seconds and has hung."""
    left_with: list[tuple[str, int]] = []
    monkeypatch.setattr(launch, "leave_at_exit", lambda *how: left_with.append(how))
    with pytest.raises(SystemExit) as left:
        await launch.serve_grpc(argparse.Namespace(host=None, port=70000), FUNCTION)
    assert left.value.code == 2
    assert left_with == [("vllm", 2)]
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --port: got '70000'; allowed: ")
