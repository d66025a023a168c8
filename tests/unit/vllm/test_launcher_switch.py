"""Ours in the place of a launcher's `serve_grpc`, whichever way its module is reached."""

from __future__ import annotations

import argparse
import inspect
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType

import pytest

from smg_grpc_servicer.vllm import launch, launcher_switch, plugin

NEW, OLD = launcher_switch.LAUNCHERS

SOURCE = """
async def serve_grpc(args):
    raise AssertionError("the launcher's own server ran")

async def main():
    await serve_grpc(None)
"""


@pytest.fixture(autouse=True)
def served(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """The stock functions that ours was called with; nothing is loaded at first."""
    for name in launcher_switch.LAUNCHERS:
        monkeypatch.delitem(sys.modules, name, raising=False)
    calls: list[object] = []

    async def serve_grpc(args: argparse.Namespace, stock: object) -> None:
        calls.append(stock)

    monkeypatch.setattr(launch, "serve_grpc", serve_grpc)
    # `announce` hooks the parsers too, for which vLLM would have to be there.
    monkeypatch.setitem(sys.modules, plugin.PARSERS, ModuleType(plugin.PARSERS))
    monkeypatch.setattr(plugin, "register", lambda: None)
    return calls


def module(monkeypatch: pytest.MonkeyPatch, name: str = NEW) -> ModuleType:
    made = ModuleType(name)
    monkeypatch.setitem(sys.modules, name, made)
    return made


@pytest.mark.parametrize("name", [NEW, OLD])
async def test_a_complete_launcher_is_switched_once(
    name: str, monkeypatch: pytest.MonkeyPatch, served: list[object]
) -> None:
    launcher = module(monkeypatch, name)
    exec(SOURCE, vars(launcher))
    stock = launcher.serve_grpc
    launcher_switch.install()
    ours = launcher.serve_grpc
    launcher_switch.install()
    assert launcher.serve_grpc is ours
    assert inspect.iscoroutinefunction(ours)
    await launcher.main()
    assert served == [stock]


async def test_a_launcher_that_is_importing_us_is_switched_when_it_is_asked(
    monkeypatch: pytest.MonkeyPatch, served: list[object]
) -> None:
    """The order of its own imports: us first, `serve_grpc` later."""
    launcher = module(monkeypatch)
    launcher_switch.announce()
    assert not hasattr(launcher, "serve_grpc")
    exec(SOURCE, vars(launcher))
    stock = vars(launcher)["serve_grpc"]
    await launcher.serve_grpc(argparse.Namespace())
    await launcher.main()
    assert served == [stock, stock]
    assert type(launcher) is ModuleType


async def test_both_hooks_one_after_the_other_switch_once(
    monkeypatch: pytest.MonkeyPatch, served: list[object]
) -> None:
    launcher = module(monkeypatch)
    launcher_switch.announce()
    exec(SOURCE, vars(launcher))
    stock = vars(launcher)["serve_grpc"]
    launcher_switch.install()
    launcher_switch.announce()
    await launcher.serve_grpc(argparse.Namespace())
    assert served == [stock]


def test_a_name_of_the_launcher_that_is_replaced_by_somebody_else_is_theirs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    launcher = module(monkeypatch)
    theirs = object()
    vars(launcher)["serve_grpc"] = theirs
    launcher_switch.install()
    assert launcher.serve_grpc is theirs


@pytest.mark.parametrize(
    ("spec", "file", "launcher"),
    [
        (NEW, None, True),
        (OLD, None, True),
        ("vllm.entrypoints.cli.main", None, False),
        (None, "/site/vllm/entrypoints/launchers/grpc_server.py", True),
        (None, "/site/vllm/entrypoints/grpc_server.py", True),
        (None, "/home/me/grpc_server.py", False),
        (None, None, False),
    ],
)
def test_the_launcher_as_the_program(
    spec: str | None, file: str | None, launcher: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = module(monkeypatch, "__main__")
    program.__spec__ = ModuleSpec(spec, None) if spec else None
    if file is not None:
        program.__file__ = file
    exec(SOURCE, vars(program))
    stock = vars(program)["serve_grpc"]
    launcher_switch.install()
    assert (vars(program)["serve_grpc"] is not stock) == launcher


def test_a_process_without_a_launcher_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plugin, "register", lambda: pytest.fail("nothing to hook"))
    launcher_switch.announce()
    launcher_switch.install()
