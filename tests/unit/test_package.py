"""What importing costs and brings, and that names, versions and extras agree."""

from __future__ import annotations

import importlib
import importlib.metadata
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import smg_grpc_servicer
from smg_grpc_servicer.__main__ import main as commands

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "src" / "smg_grpc_servicer"
WINGS = ("vllm", "sglang", "mlx", "tokenspeed")
HEAVY = {
    "huggingface_hub",
    "mlx",
    "mlx_lm",
    "numpy",
    "opentelemetry",
    "prometheus_client",
    "sglang",
    "tokenizers",
    "tokenspeed",
    "torch",
    "transformers",
    "vllm",
    "zmq",
}


def run_python(code: str, *options: str) -> subprocess.CompletedProcess[str]:
    """A new interpreter with this checkout's package; what it said stands in the failure."""
    # As a literal, not through the environment: the test's own may point elsewhere.
    line = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r}); {code}"
    done = subprocess.run(
        [sys.executable, *options, "-c", line], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done


def import_cost_us(module: str) -> int:
    """Microseconds that importing `module` took, what it imported itself included."""
    report = run_python(f"import {module}", "-X", "importtime").stderr
    costs = re.findall(rf"\|\s*(\d+) \|\s*{re.escape(module)}$", report, re.MULTILINE)
    assert len(costs) == 1, f"{module} stands {len(costs)} times in the report"
    return int(costs[0])


def modules_after(module: str) -> set[str]:
    """Top-level names in sys.modules after importing `module` in a new interpreter."""
    out = run_python(f"import {module}; print(*{{m.partition('.')[0] for m in sys.modules}})")
    return set(out.stdout.split())


def test_importing_the_package_costs_under_30_ms() -> None:
    assert min(import_cost_us("smg_grpc_servicer") for _ in range(5)) < 30_000


def test_importing_the_package_brings_nothing_but_the_standard_library() -> None:
    brought = modules_after("smg_grpc_servicer") - modules_after("sys")
    assert brought == {"smg_grpc_servicer"}


@pytest.mark.parametrize("wing", WINGS)
def test_importing_a_wing_brings_no_engine(wing: str) -> None:
    assert not modules_after(f"smg_grpc_servicer.{wing}") & HEAVY


@pytest.mark.parametrize("room", ["core", "testing", "warmup"])
def test_importing_every_module_of_a_shared_room_brings_no_engine(room: str) -> None:
    names = [
        ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts)
        for path in sorted((PACKAGE / room).rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]
    assert names
    code = f"import {', '.join(names)}; print(*{{m.partition('.')[0] for m in sys.modules}})"
    assert not set(run_python(code).stdout.split()) & HEAVY


def test_the_version_is_the_installed_distributions() -> None:
    assert smg_grpc_servicer.__version__ == importlib.metadata.version("smg-grpc-servicer")


def test_the_package_is_marked_as_typed() -> None:
    assert (PACKAGE / "py.typed").is_file()


def _why_not(module: ModuleType, name: str) -> str:
    """What an ImportError says, or nothing when the name is there."""
    try:
        getattr(module, name)
    except ImportError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("room", ["testing", *WINGS])
def test_every_exported_name_is_there(room: str) -> None:
    """A lazy export that names nothing would only show at a user's; a missing extra is named."""
    module = importlib.import_module(f"smg_grpc_servicer.{room}")
    exported = getattr(module, "__all__", [])
    assert len(set(exported)) == len(exported)
    reasons = [reason for name in exported if (reason := _why_not(module, name))]
    assert [reason for reason in reasons if f"smg-grpc-servicer[{room}]" not in reason] == []


def test_extras_named_in_the_documents_and_messages_exist() -> None:
    extras = set(importlib.metadata.metadata("smg-grpc-servicer").get_all("Provides-Extra") or [])
    texts = [*ROOT.glob("*.md"), *PACKAGE.rglob("*.py")]
    named = {
        (path.name, extra.strip())
        for path in texts
        for group in re.findall(r"smg-grpc-servicer\[([\w\-, ]+)\]", path.read_text())
        for extra in group.split(",")
    }
    assert {(name, extra) for name, extra in named if extra not in extras} == set()
    assert {"vllm", "vllm-redis", "sglang", "mlx", "tokenspeed"} <= extras
    assert {"metrics", "otel", "cli", "test", "dev"} <= extras


@pytest.mark.parametrize(
    ("argument", "code", "told"),
    [
        ("--version", 0, f"smg-grpc-servicer {smg_grpc_servicer.__version__}\n"),
        ("--help", 0, "python -m smg_grpc_servicer.conformance ADDRESS"),
        ("mlx", 2, "error: unrecognized arguments: mlx"),
    ],
)
def test_the_package_itself_explains(
    argument: str, code: int, told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        commands([argument])
    said = capsys.readouterr()
    assert ended.value.code == code
    assert told in said.out + said.err
