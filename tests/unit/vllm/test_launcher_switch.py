"""Ours in the place of a launcher's `serve_grpc`, whichever way its module is reached."""

from __future__ import annotations

import argparse
import importlib
import inspect
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from smg_grpc_servicer.core.errors import ConfigError
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


State = launcher_switch.State


@pytest.fixture
def importing(monkeypatch: pytest.MonkeyPatch) -> dict[str, ImportError]:
    """What `install_in_new` finds when it imports a launcher."""
    errors: dict[str, ImportError] = {}

    def import_module(name: str) -> ModuleType:
        if name in errors:
            raise errors[name]
        return sys.modules[name]

    monkeypatch.setattr(launcher_switch, "_unimportable", {})
    monkeypatch.setattr(importlib, "import_module", import_module)
    return errors


def absent(name: str, missing: str | None = None) -> ImportError:
    return ModuleNotFoundError(f"No module named {missing or name!r}", name=missing or name)


def test_a_launcher_is_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    exec(SOURCE, vars(module(monkeypatch)))
    assert launcher_switch.state() == (State.PENDING, NEW)
    launcher_switch.install()
    assert launcher_switch.state() == (State.BOUND, NEW)
    launcher_switch.require("--servicer-impl")


def test_a_launcher_that_is_importing_us_is_pending(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = module(monkeypatch)
    launcher.__spec__ = ModuleSpec(NEW, None)
    vars(launcher.__spec__)["_initializing"] = True
    launcher_switch.announce()
    assert launcher_switch.state() == (State.PENDING, NEW)
    launcher_switch.require("--servicer-impl")
    # It is through, and had nothing to serve with.
    vars(launcher.__spec__)["_initializing"] = False
    assert launcher_switch.state() == (State.MISSING, NEW)


def test_a_launcher_that_asks_in_its_own_source_passes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    file = tmp_path / "grpc_server.py"
    file.write_text("from smg_grpc_servicer.vllm import resolve_servicer_impl\n")
    module(monkeypatch).__file__ = str(file)
    assert launcher_switch.state() == (State.SOURCE, NEW)
    launcher_switch.require("--servicer-impl")


@pytest.mark.parametrize("text", ["", "import asyncio\n"])
def test_a_launcher_without_serve_grpc_is_refused(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str
) -> None:
    file = tmp_path / "grpc_server.py"
    file.write_text(text)
    module(monkeypatch).__file__ = str(file)
    assert launcher_switch.state() == (State.MISSING, NEW)
    with pytest.raises(ConfigError) as refused:
        launcher_switch.require("--servicer-impl")
    assert str(refused.value) == (
        "--servicer-impl: the installed vLLM cannot be switched to it: its gRPC launcher "
        f"{NEW} defines no serve_grpc; allowed: vLLM 0.28 to 0.33"
    )


def test_a_serve_grpc_of_somebody_else_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    vars(module(monkeypatch))["serve_grpc"] = []
    assert launcher_switch.state() == (State.FOREIGN, NEW)
    with pytest.raises(ConfigError, match="was replaced by another package"):
        launcher_switch.require("SMG_VLLM_SERVICER_IMPL")


@pytest.mark.parametrize("missing", [None, "vllm.entrypoints.launchers", "vllm"])
def test_a_vllm_without_a_launcher_is_refused(
    importing: dict[str, ImportError], missing: str | None
) -> None:
    importing |= {NEW: absent(NEW, missing), OLD: absent(OLD)}
    launcher_switch.install_in_new()
    assert launcher_switch.state()[0] is State.ABSENT
    with pytest.raises(ConfigError, match=f"it has no gRPC launcher {NEW} or {OLD}"):
        launcher_switch.require("--servicer-impl")


def test_a_launcher_that_cannot_be_imported_is_left_to_vllm(
    importing: dict[str, ImportError],
) -> None:
    """It will be imported again, by vLLM, and that says what is wrong with it."""
    importing |= {NEW: ImportError("gRPC mode requires more"), OLD: absent(OLD)}
    launcher_switch.install_in_new()
    assert launcher_switch.state() == (State.UNKNOWN, NEW)
    launcher_switch.require("--servicer-impl")
    importing[NEW] = absent(NEW, "grpc_reflection")
    launcher_switch.install_in_new()
    assert launcher_switch.state()[0] is State.UNKNOWN


def test_the_old_name_alone_is_enough(
    monkeypatch: pytest.MonkeyPatch, importing: dict[str, ImportError]
) -> None:
    exec(SOURCE, vars(module(monkeypatch, OLD)))
    importing[NEW] = absent(NEW, "vllm.entrypoints.launchers")
    launcher_switch.install_in_new()
    assert launcher_switch.state() == (State.BOUND, OLD)
