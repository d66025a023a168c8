#!/usr/bin/env python3
"""Run one tool of a suite's venv in the checkout: `.ci/tool.py SUITE TOOL [ARGUMENT ...]`."""

from __future__ import annotations

import os
import subprocess
import sys

from suites import SUITES
from venvs import ROOT, SetupError


def main() -> int:
    """Make the venv when it is missing, then run; the exit code is the tool's."""
    venvs = {suite.name: suite.venv for suite in SUITES}
    if len(sys.argv) < 3 or sys.argv[1] not in venvs:
        print(f"{__doc__}\nSUITE is one of {', '.join(venvs)}", file=sys.stderr)
        return 2
    try:
        python = venvs[sys.argv[1]].ready()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    tool = python.parent / sys.argv[2]
    if not tool.exists():
        print(f"the venv of {sys.argv[1]} has no {sys.argv[2]!r}", file=sys.stderr)
        return 2
    env = os.environ | {"PYTHONPATH": str(ROOT / "src")}
    return subprocess.call([tool, *sys.argv[3:]], cwd=ROOT, env=env)


if __name__ == "__main__":
    sys.exit(main())
