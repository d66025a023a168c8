"""Whether a vLLM's launcher leads to us, told from its source."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from smg_grpc_servicer.vllm import rust
from smg_grpc_servicer.vllm.upstream import require_upstream_hook, upstream_hook_installed

GUARDED = """
try:
    from smg_grpc_servicer.vllm.servicer import VllmEngineServicer
except ImportError as error:
    raise
"""


def installed(folder: Path, text: str, name: str = "launchers/grpc_server.py") -> Path:
    file = folder / "entrypoints" / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return folder


@pytest.mark.parametrize("name", ["launchers/grpc_server.py", "grpc_server.py"])
@pytest.mark.parametrize(
    ("text", "leads"),
    [
        (GUARDED, True),
        ("import smg_grpc_servicer.vllm.health_servicer as health", True),
        ("from smg_grpc_servicer.vllm import servicer", True),
        ("from smg_grpc_servicer.vllm import VllmHealthServicer", True),
        ("if True:\n    from smg_grpc_servicer.vllm import VllmEngineServicer", True),
        ("with open('x'):\n    import smg_grpc_servicer.vllm.servicer", True),
        ("def main():\n    import smg_grpc_servicer.vllm.servicer", False),
        ("if TYPE_CHECKING:\n    import smg_grpc_servicer.vllm.servicer", False),
        ("if typing.TYPE_CHECKING:\n    pass\nelse:\n    import smg_grpc_servicer.vllm.servicer",
         True),
        ("from .smg_grpc_servicer.vllm import servicer", False),
        ("from smg_grpc_servicer.mlx import servicer", False),
        ("def main():\n    from smg_grpc_servicer.vllm import resolve_servicer_impl", True),
        ("this is no Python", False),
        ("", False),
    ],
)  # fmt: skip
def test_a_launcher_leads_here_or_not(tmp_path: Path, name: str, text: str, leads: bool) -> None:
    assert upstream_hook_installed(installed(tmp_path, text, name)) is leads


def test_any_entry_point_may_ask(tmp_path: Path) -> None:
    installed(tmp_path, "", "grpc_server.py")
    assert upstream_hook_installed(installed(tmp_path, "resolve_servicer_impl(args)", "cli/x.py"))


def test_requiring_it_says_what_is_missing(tmp_path: Path) -> None:
    require_upstream_hook(installed(tmp_path / "one", GUARDED))
    with pytest.raises(RuntimeError, match="has no gRPC launcher that this package can switch"):
        rust.require_upstream_hook(tmp_path / "none")


def test_asking_imports_nothing_of_vllm() -> None:
    """`smg serve` asks in the router's process."""
    code = (
        "import sys; from smg_grpc_servicer.vllm.rust import upstream_hook_installed\n"
        "upstream_hook_installed()\n"
        "print(*{m.partition('.')[0] for m in sys.modules} & {'vllm', 'torch', 'msgspec', 'smg'})"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=True
    )
    assert done.stdout.split() == []
