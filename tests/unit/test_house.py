"""Rules of the house that no linter knows."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
TOP_LEVEL = {
    "CHANGELOG.md",
    "DEVELOPMENT.md",
    "LICENSE",
    "Makefile",
    "README.md",
    "benchmarks",
    "pyproject.toml",
    "src",
    "tests",
}
HARD_STOP = 400
SOURCES = sorted((ROOT / "src").rglob("*.py"))


def _id(path: Path) -> str:
    return str(path.relative_to(ROOT / "src"))


def test_the_top_level_holds_only_what_belongs_there() -> None:
    """Asked of git where there is a repository: build leftovers are ignored files, not entries."""
    if (ROOT / ".git").exists():
        listing = subprocess.run(
            ["git", "-C", str(ROOT), "ls-files", "--cached", "--others", "--exclude-standard"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout.splitlines()
        present = {line.partition("/")[0] for line in listing}
    else:
        present = {path.name for path in ROOT.iterdir()} - {"PKG-INFO"}
    assert {name for name in present if not name.startswith(".")} == TOP_LEVEL


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_a_file_is_one_idea(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= HARD_STOP


@pytest.mark.parametrize("path", SOURCES, ids=_id)
def test_cancellation_is_never_swallowed(path: Path) -> None:
    """A handler that would catch a cancel (bare, BaseException, CancelledError) raises again."""
    for node in ast.walk(ast.parse(path.read_text())):
        if not isinstance(node, ast.ExceptHandler):
            continue
        caught = {n.id for n in ast.walk(node.type) if isinstance(n, ast.Name)} if node.type else {}
        attributes = (
            {n.attr for n in ast.walk(node.type) if isinstance(n, ast.Attribute)}
            if node.type
            else {"BaseException"}
        )
        if {"BaseException", "CancelledError"} & {*caught, *attributes}:
            raises = any(isinstance(n, ast.Raise) for n in ast.walk(node))
            assert raises, f"{_id(path)}:{node.lineno} may swallow a cancel"
