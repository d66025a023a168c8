"""The commands in the README are commands that exist, and the first one works."""

from __future__ import annotations

import importlib.util
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.child import running

ROOT = Path(__file__).resolve().parents[2]


def shell_lines() -> list[str]:
    """The lines of the README's shell blocks, without prompts, comments and continuations."""
    text = (ROOT / "README.md").read_text()
    blocks = re.findall(r"^```(?:sh|bash|shell|console)\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    lines = "".join(blocks).replace("\\\n", " ").splitlines()
    return [line.removeprefix("$ ").partition(" #")[0].strip() for line in lines]


def test_the_readme_shows_the_two_commands_first() -> None:
    commands = [line for line in shell_lines() if line]
    assert commands[:2] == ["make demo", "make test"]


def test_every_make_target_of_the_readme_exists() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    used = {m for line in shell_lines() for m in re.findall(r"^make ([a-z]+)", line)}
    assert used
    assert used <= targets


def test_every_module_of_the_readme_exists() -> None:
    used = {m for line in shell_lines() for m in re.findall(r"-m (smg_grpc_servicer[\w.]*)", line)}
    missing = {
        name
        for name in used
        if importlib.util.find_spec(name) is None
        or (importlib.util.find_spec(name + ".__main__") is None and _is_package(name))
    }
    assert not missing


def test_the_package_itself_names_the_commands_of_the_readme() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "smg_grpc_servicer"], capture_output=True, text=True, check=True
    )
    named = set(re.findall(r"-m (smg_grpc_servicer[\w.]+)", done.stdout))
    in_readme = re.findall(r"-m (smg_grpc_servicer[\w.]+)", (ROOT / "README.md").read_text())
    assert named == set(in_readme)


def test_the_client_of_the_readme_gets_its_tokens() -> None:
    """As it stands there, but for the port."""
    text = (ROOT / "README.md").read_text()
    (program,) = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert "127.0.0.1:50051" in program
    with running("--port", "0", module="smg_grpc_servicer.testing") as server:
        address = server.address()
        server.wait_for("state: serving")
        done = subprocess.run(
            [sys.executable, "-c", program.replace("127.0.0.1:50051", address)],
            capture_output=True,
            text=True,
            check=False,
        )
    assert done.returncode == 0, done.stderr
    assert 'finish_reason: "length"' in done.stdout
    assert "completion_tokens: 8" in done.stdout


def _is_package(name: str) -> bool:
    spec = importlib.util.find_spec(name)
    return spec is not None and spec.submodule_search_locations is not None


@pytest.mark.timeout(600)
def test_make_demo_streams_an_answer_and_exits_cleanly() -> None:
    """The promise of the first line of the README: one command, exit code 0."""
    done = subprocess.run(
        ["make", "--no-print-directory", "demo"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"\b\d+\b.*tokens|tokens.*\b\d+\b", done.stdout), done.stdout
