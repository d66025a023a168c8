"""SGLang loads our plugin in every process of its, and imports our server late: both are light."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from smg_grpc_servicer import sglang
from smg_grpc_servicer.sglang import health_servicer, server, servicer


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


@pytest.mark.parametrize(
    ("flag", "variable", "made"),
    [
        ("--smg-grpc-mode", "", "uvloop"),
        ("--grpc-mode", "asyncio", "asyncio"),
        ("-x", "", "asyncio"),
    ],
)
def test_the_launcher_runs_on_uvloop(flag: str, variable: str, made: str) -> None:
    pytest.importorskip("uvloop")
    code = (
        "import asyncio, smg_grpc_servicer.sglang.plugin as plugin; plugin.register()\n"
        "async def main(): print(type(asyncio.get_running_loop()).__module__.partition('.')[0])\n"
        "asyncio.run(main())"
    )
    environment = {"SMG_SERVICER_EVENT_LOOP": variable, "PYTHONPATH": ":".join(sys.path)}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, flag],
        capture_output=True, text=True, timeout=30, check=True, env=environment,
    )  # fmt: skip
    assert ended.stdout.strip() == made


def test_the_package_names_them() -> None:
    assert sglang.SGLangSchedulerServicer is servicer.SGLangSchedulerServicer
    assert sglang.SGLangHealthServicer is health_servicer.SGLangHealthServicer
    with pytest.raises(AttributeError, match="no attribute 'other'"):
        _ = sglang.other


def test_sglang_finds_the_hook_by_its_name() -> None:
    """Without it SGLang leaves out its HTTP sidecar."""
    assert list(inspect.signature(server.serve_grpc).parameters) == [
        "server_args",
        "model_info",
        "on_request_manager_ready",
    ]
