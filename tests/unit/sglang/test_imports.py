"""SGLang loads our plugin in every process of its, and imports our server late: both are light."""

from __future__ import annotations

import inspect
import multiprocessing
import subprocess
import sys
from types import SimpleNamespace

import pytest

from smg_grpc_servicer import sglang
from smg_grpc_servicer.sglang import health_servicer, plugin, request_manager, server, servicer


@pytest.mark.parametrize(
    "name", ["server", "servicer", "health_servicer", "adapter", "engine_life", "processes"]
)
def test_importing_a_room_imports_no_engine(name: str) -> None:
    code = (
        f"import sys, smg_grpc_servicer.sglang.{name}\n"
        "print(*{m.partition('.')[0] for m in sys.modules} & {'sglang', 'torch', 'transformers'})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout.split() == []


def test_the_plugin_costs_the_engine_s_processes_nothing() -> None:
    code = (
        "import sys, smg_grpc_servicer.sglang.plugin as plugin; plugin.register()\n"
        "print(*{m.partition('.')[0] for m in sys.modules} & {'sglang', 'grpc', 'uvloop', 'zmq'})"
    )
    ended = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert ended.stdout.split() == []


def test_only_a_process_that_may_parse_gets_hooks(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank parses nothing; without SGLang's registry there is nothing to hook into."""
    registered: list[str] = []
    registry = SimpleNamespace(register=lambda target, *_: registered.append(target))
    plugin.register()
    hooks = SimpleNamespace(HookRegistry=registry, HookType=SimpleNamespace(AFTER="after"))
    monkeypatch.setitem(sys.modules, plugin.HOOKS, hooks)
    monkeypatch.setattr(multiprocessing, "parent_process", object)
    plugin.register()
    assert registered == []
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, plugin.HOOKS, hooks)
    plugin.register()
    assert registered == [f"{plugin.RECORD}.add_cli_args", f"{plugin.RECORD}.from_cli_args"]


def test_the_package_names_them() -> None:
    assert sglang.SGLangSchedulerServicer is servicer.SGLangSchedulerServicer
    assert sglang.SGLangHealthServicer is health_servicer.SGLangHealthServicer
    assert request_manager.GrpcRequestManager is request_manager.RequestManager
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = sglang.other


def test_sglang_finds_the_hook_by_its_name() -> None:
    """Without it SGLang leaves out its HTTP sidecar."""
    assert list(inspect.signature(server.serve_grpc).parameters) == [
        "server_args",
        "model_info",
        "on_request_manager_ready",
    ]
