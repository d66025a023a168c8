#!/usr/bin/env python3
"""Run the benchmarks in the MLX suite's venv, the published package beside them in one of its own.

`.ci/bench.py [NAME ...]`; the names are those of `python -m benchmarks`.
"""

from __future__ import annotations

import os
import subprocess
import sys

from venvs import ROOT, SetupError, Venv, Wanted


def main() -> int:
    """Make both venvs when they are missing, then run; the exit code is the benchmarks'."""
    try:
        python = Venv("mlx", Wanted(11, 11)).ready()
        published = Venv("published", Wanted(11, 10), project=False).ready()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    env = os.environ | {"SMG_PUBLISHED_PYTHON": str(published)}
    return subprocess.call([python, "-m", "benchmarks", *sys.argv[1:]], cwd=ROOT, env=env)


if __name__ == "__main__":
    sys.exit(main())
