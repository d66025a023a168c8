#!/usr/bin/env python3
"""Run the benchmarks in their suites' venvs, the published package beside ours in its own.

`.ci/bench.py [NAME ...]`; the names are those of `python -m benchmarks`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

from venvs import (
    CACHE,
    COMPLETE,
    ROOT,
    SetupError,
    Venv,
    Wanted,
    exclusive,
    is_complete,
    run_quiet,
    say,
)

VENVS = {"messages": "mlx", "mlx": "mlx", "vllm": "vllm", "sglang": "sglang", "rust": "vllm"}
"""Benchmark to the lock of the venv it runs in."""


def published_folder(python: Path) -> Path:
    """The published package without what it depends on, in a folder of its own."""
    lines = (ROOT / ".ci" / "locks" / "published.txt").read_text().splitlines()
    pin = next(line for line in lines if line.startswith("smg-grpc-servicer=="))
    folder = CACHE / pin.replace("==", "-")
    with exclusive(folder):
        if not is_complete(folder):
            say(f"downloading {pin} ...")
            pip = [str(python), "-m", "pip", "install", "-q", "--disable-pip-version-check"]
            run_quiet([*pip, "--no-deps", "--target", str(folder), pin], what=f"pip install {pin}")
            (folder / COMPLETE).touch()
    return folder


def run(lock: str, names: list[str]) -> int:
    """Run those of one venv; the exit code is the benchmarks'."""
    python = Venv(lock, Wanted(11, 11)).ready()
    env = dict(os.environ)
    if "mlx" in names:
        published = Venv("published", Wanted(11, 10), project=False).ready()
        env["SMG_PUBLISHED_PYTHON"] = str(published)
    if "vllm" in names or "sglang" in names:
        env["SMG_PUBLISHED_FOLDER"] = str(published_folder(python))
    if "rust" in names:
        env["SMG_RUST_PYTHON"] = str(Venv("rust", Wanted(11, 11)).ready())
        newer = Venv("rust-newer", Wanted(11, 10), project=False).ready()
        env["SMG_NEWER_BINDING"] = str(newer)
    return subprocess.call([python, "-m", "benchmarks", *names], cwd=ROOT, env=env)


def main() -> int:
    """Run what is named, all by default; 1 when a target was missed or a venv was not made."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("name", nargs="*", help=f"all when none is given: {', '.join(VENVS)}")
    chosen = parser.parse_args().name or list(VENVS)
    unknown = [name for name in chosen if name not in VENVS]
    if unknown:
        parser.error(f"no benchmark is named {unknown[0]!r}; there are {', '.join(VENVS)}")
    locks = dict.fromkeys(VENVS[name] for name in chosen)
    code = 0
    try:
        for lock in locks:
            code = max(code, run(lock, [name for name in chosen if VENVS[name] == lock]))
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    return code


if __name__ == "__main__":
    sys.exit(main())
