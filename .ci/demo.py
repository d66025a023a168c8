#!/usr/bin/env python3
"""The demo command: install the package with its MLX extra into a venv and show it at work.

Nothing is written into the checkout; the venv is made once. Exit code: the demo's own.
"""

from __future__ import annotations

import subprocess
import sys

from venvs import (
    COMPLETE,
    LOCKS,
    ROOT,
    SetupError,
    Wanted,
    exclusive,
    find_python,
    install_project,
    is_complete,
    make,
    say,
    venv_folder,
)

PYTHONS = Wanted(preferred=11, oldest=10)


def main() -> int:
    """Install once, then hand over to the package's own demo."""
    try:
        python = find_python(PYTHONS)
        lock = LOCKS / "mlx.txt"
        # Editable, so the venv belongs to this checkout.
        folder = venv_folder("demo", python, lock.read_text(), str(ROOT))
        # The tested versions where they exist for this Python, else the newest within the ranges.
        tested = ["-c", str(lock)] if python.version >= (3, 11, 0) else []
        with exclusive(folder):
            if is_complete(folder):
                say(f"using the venv {folder} (Python {python.text})")
            else:
                say(f"making the venv {folder} (Python {python.text})")
                say("and installing .[mlx] into it: about a minute and 400 MB, once ...")
                make(folder, python)
            install_project(folder, [*tested, "-e", f"{ROOT}[mlx,uvloop]"])
            (folder / COMPLETE).touch()
    except SetupError as error:
        print(error, file=sys.stderr)
        return 1
    argv = [str(folder / "bin" / "python"), "-m", "smg_grpc_servicer.mlx.demo"]
    say("running python -m smg_grpc_servicer.mlx.demo")
    return subprocess.call(argv)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
