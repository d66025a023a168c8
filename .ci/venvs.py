"""Virtual environments for the commands in this folder: named by content, outside the checkout.

Standard library only, Python 3.10 or newer. A venv's folder is named by its lock's hash and its
interpreter's version, so a changed lock makes a new one and an unchanged one costs nothing.
Raises SetupError with what the person can do.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ROOT / ".ci" / "locks"
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "smg-grpc-servicer"
NEWEST_MINOR = 14
COMPLETE = ".complete"  # present in a finished venv; its time is that of the last use
KEEP_DAYS = 14

_started = time.monotonic()


class SetupError(Exception):
    """A venv could not be made; the message says why and what would help."""


def say(text: str) -> None:
    """Print one line with the seconds since the command began."""
    print(f"[{time.monotonic() - _started:7.1f}s] {text}", flush=True)


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A Python that was seen to run."""

    path: str
    version: tuple[int, int, int]

    @property
    def text(self) -> str:
        return ".".join(map(str, self.version))


@dataclass(frozen=True, slots=True)
class Wanted:
    """Which Pythons a venv may use: the preferred minor first, then anything from `oldest` on."""

    preferred: int
    oldest: int

    @property
    def minors(self) -> list[int]:
        rest = [m for m in range(NEWEST_MINOR, self.oldest - 1, -1) if m != self.preferred]
        return [self.preferred, *sorted(rest, key=lambda m: abs(m - self.preferred))]


def _look(path: str) -> Interpreter | None:
    """Run it and ask; a version manager's stub that only prints an error is no Python."""
    code = "import sys, venv; print(*sys.version_info[:3])"
    try:
        done = subprocess.run(
            [path, "-c", code], capture_output=True, text=True, timeout=60, check=True
        )
        major, minor, patch = map(int, done.stdout.split())
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return Interpreter(path, (major, minor, patch))


def _candidates(minor: int) -> Iterator[str]:
    if sys.version_info[:2] == (3, minor):
        yield sys.executable
    if found := shutil.which(f"python3.{minor}"):
        yield found
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    for folder in sorted(pyenv.glob(f"3.{minor}.*"), reverse=True):
        yield str(folder / "bin" / "python")


def find_python(wanted: Wanted) -> Interpreter:
    """Find the first Python that runs, in the order of preference."""
    for minor in wanted.minors:
        for path in _candidates(minor):
            found = _look(path)
            if found is not None and found.version[:2] == (3, minor):
                return found
    raise SetupError(
        f"no Python 3.{wanted.oldest} or newer found (looked at this interpreter, python3.N on "
        f"PATH and pyenv); install python3.{wanted.preferred}"
    )


def run_quiet(argv: Sequence[str], *, what: str) -> None:
    """Run a set-up command; its output is shown only when it fails."""
    done = subprocess.run(
        list(argv),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    if done.returncode:
        raise SetupError(f"{what} failed with exit code {done.returncode}:\n{done.stdout.strip()}")


def _digest(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:12]


@dataclass(frozen=True, slots=True)
class Venv:
    """One environment; `lock` is a file name in .ci/locks without its ending."""

    lock: str
    wanted: Wanted
    project: bool = True

    @property
    def lock_file(self) -> Path:
        return LOCKS / f"{self.lock}.txt"

    def folder(self, python: Interpreter) -> Path:
        if not self.lock_file.is_file():
            raise SetupError(f"{self.lock_file} is missing; make it with .ci/lock.py {self.lock}")
        return venv_folder(self.lock, python, self.lock_file.read_text())

    def ready(self) -> Path:
        """Make what is missing and give the path of the venv's Python."""
        python = find_python(self.wanted)
        folder = self.folder(python)
        with exclusive(folder):
            if is_complete(folder):
                say(f"{self.lock}: using {folder} (Python {python.text})")
            else:
                say(f"{self.lock}: making {folder} (Python {python.text}) ...")
                make(folder, python, ["--no-deps", "-r", str(self.lock_file)])
            (folder / COMPLETE).touch()
            if self.project:
                install_project(folder, ["--no-deps", "--no-build-isolation", "-e", str(ROOT)])
        return folder / "bin" / "python"


def venv_folder(name: str, python: Interpreter, *contents: str) -> Path:
    """Where a venv with these contents lives."""
    return CACHE / "venvs" / f"{name}-{_digest(*contents, python.text, sys.platform)}"


def _pip_install(folder: Path) -> list[str]:
    python = str(folder / "bin" / "python")
    return [python, "-m", "pip", "install", "-q", "--no-compile", "--disable-pip-version-check"]


def make(folder: Path, python: Interpreter, install: Sequence[str] = ()) -> None:
    """Make a venv from nothing; an unfinished one never carries the mark of a finished one."""
    if folder.exists():
        shutil.rmtree(folder)
    run_quiet([python.path, "-m", "venv", str(folder)], what="python -m venv")
    if install:
        add(folder, install)
    (folder / COMPLETE).touch()
    _forget_old(folder)


def add(folder: Path, install: Sequence[str]) -> None:
    """Install more into a venv."""
    run_quiet([*_pip_install(folder), *install], what=f"pip install into {folder.name}")


def _forget_old(folder: Path) -> None:
    """Remove venvs of the same lock, as it once was, that nobody has used for a while."""
    name = folder.name.rpartition("-")[0]
    for mark in folder.parent.glob(f"{name}-*/{COMPLETE}"):
        same = mark.parent.name.rpartition("-")[0] == name
        if same and time.time() - mark.stat().st_mtime > KEEP_DAYS * 86400:
            say(f"{name}: removing {mark.parent}, unused for {KEEP_DAYS} days")
            shutil.rmtree(mark.parent)


def install_project(folder: Path, options: Sequence[str]) -> None:
    """Point the venv at this checkout; done again only when the checkout or its metadata moved."""
    version_file = ROOT / "src" / "smg_grpc_servicer" / "__init__.py"
    metadata = (ROOT / "pyproject.toml").read_text()
    key = _digest(str(ROOT), metadata, version_file.read_text())
    stamp = folder / ".project"
    if stamp.is_file() and stamp.read_text() == key:
        return
    run_quiet([*_pip_install(folder), *options], what="pip install of this checkout")
    stamp.write_text(key)


def is_complete(folder: Path) -> bool:
    """Whether a venv was finished, not merely begun."""
    return (folder / COMPLETE).is_file()


@contextlib.contextmanager
def exclusive(folder: Path) -> Iterator[None]:
    """Two commands that want the same venv take turns."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with folder.with_suffix(".lock").open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield


def lower_bounds(requirements: Sequence[str]) -> list[str]:
    """Turn `name[extra]>=a,<b; marker` into `name[extra]==a; marker`: a venv of oldest versions."""
    pinned = []
    for requirement in requirements:
        spec, _, marker = requirement.partition(";")
        match = re.match(r"\s*([\w.\-]+(?:\[[^\]]*\])?).*?>=\s*([\w.]+)", spec)
        if match is None:
            continue
        pinned.append(f"{match[1]}=={match[2]}" + (f";{marker}" if marker else ""))
    return pinned
