"""What a user gets: the wheel and the sdist, and a clean venv with nothing but the wheel."""

from __future__ import annotations

import configparser
import email
import importlib
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path, PurePosixPath

import pytest

ROOT = Path(__file__).resolve().parents[2]
LOCK = ROOT / ".ci" / "locks" / "core.txt"
MAX_WHEEL_BYTES = 4 * 1024 * 1024

pytestmark = pytest.mark.timeout(300)


def run(*argv: str | Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Away from the checkout, so that only what is installed can be imported."""
    return subprocess.run(
        [str(a) for a in argv],
        cwd=cwd,
        env={"PATH": "/usr/bin:/bin", "HOME": str(cwd)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture(scope="session")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Both distributions; the wheel is built from the sdist, as an index's users would."""
    folder = tmp_path_factory.mktemp("dist")
    done = run(sys.executable, "-m", "build", "-n", "-o", folder, ROOT, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


@pytest.fixture(scope="session")
def wheel(dist: Path) -> Path:
    (path,) = dist.glob("*.whl")
    return path


@pytest.fixture(scope="session")
def clean(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of a new venv with the wheel and its hard dependencies, no extra."""
    folder = tmp_path_factory.mktemp("clean")
    venv.create(folder / "venv", with_pip=True)
    python = folder / "venv" / "bin" / "python"
    options = ("-q", "--disable-pip-version-check", "-c", str(LOCK))
    done = subprocess.run(
        [python, "-m", "pip", "install", *options, wheel],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return python


def test_the_wheel_holds_every_source_file_and_no_other_package(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {PurePosixPath(name).parts[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"smg_grpc_servicer"}
    package = ROOT / "src" / "smg_grpc_servicer"
    sources = {
        str(path.relative_to(package.parent))
        for path in package.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert sources <= set(names)
    assert any(name.endswith("licenses/LICENSE") for name in names)


def test_the_wheel_holds_the_demo_model(wheel: Path) -> None:
    names = [PurePosixPath(name) for name in zipfile.ZipFile(wheel).namelist()]
    demo = {path.name for path in names if "mlx" in path.parts and "demo" in path.parts}
    assert {"config.json", "tokenizer.json", "tokenizer_config.json"} <= demo
    assert any(name.endswith(".safetensors") for name in demo)
    assert wheel.stat().st_size <= MAX_WHEEL_BYTES


def test_the_metadata_names_version_python_and_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/METADATA")]
    metadata = email.message_from_bytes(archive.read(name))
    version = wheel.name.split("-")[1]
    assert metadata["Version"] == version
    assert metadata["Requires-Python"] == ">=3.10"
    assert metadata["License-Expression"] == "Apache-2.0"


@pytest.mark.parametrize("group", ["vllm.general_plugins", "sglang.srt.plugins"])
def test_the_wheel_tells_engines_of_our_plugins(wheel: Path, group: str) -> None:
    archive = zipfile.ZipFile(wheel)
    (name,) = [n for n in archive.namelist() if n.endswith(".dist-info/entry_points.txt")]
    declared = configparser.ConfigParser()
    declared.read_string(archive.read(name).decode())
    value = declared[group]["smg-servicer"]
    module, _, attribute = value.partition(":")
    assert callable(getattr(importlib.import_module(module), attribute))


def test_the_sdist_holds_what_building_and_testing_needs(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    with tarfile.open(path) as archive:
        inside = {PurePosixPath(*PurePosixPath(n).parts[1:]) for n in archive.getnames()}
    tops = {path.parts[0] for path in inside if path.parts}
    assert {"LICENSE", "Makefile", "README.md", "pyproject.toml", "src", "tests"} <= tops
    assert PurePosixPath(".ci/test.py") in inside


def test_the_clean_install_is_consistent(clean: Path, tmp_path: Path) -> None:
    done = run(clean, "-m", "pip", "check", cwd=tmp_path)
    assert done.returncode == 0, done.stdout


def test_help_of_the_mlx_server_works_without_mlx(clean: Path, tmp_path: Path) -> None:
    done = run(clean, "-m", "smg_grpc_servicer.mlx", "--help", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "--model" in done.stdout


def test_starting_the_mlx_server_without_mlx_names_the_extra(clean: Path, tmp_path: Path) -> None:
    done = run(
        *(clean, "-m", "smg_grpc_servicer.mlx", "--model", "demo"),
        *("--host", "127.0.0.1", "--port", "0"),
        cwd=tmp_path,
    )
    assert done.returncode != 0
    assert "smg-grpc-servicer[mlx]" in done.stderr
