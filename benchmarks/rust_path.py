"""The Python and the Rust path under the same load, over the same stub of an engine core.

    python benchmarks/rust_path.py [--rounds 3]

Runs where vLLM is. SMG_RUST_PYTHON is a Python with the wheel `smg`, SMG_NEWER_BINDING one of a
venv with its newer build. CPU is that of the server process alone; the engine and the client are
others. The engine takes a step every PACE seconds and gives every request one token.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import replace
from functools import cached_property
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import served
from benchmarks.served import ROOT, Load, Loads, Target, measured, report, take_turns
from benchmarks.support import median
from benchmarks.vllm_real import cpu_seconds
from benchmarks.vllm_servicer import Work
from tests.support import real_vllm
from tests.support.rust_served import packages_of

PACE = 0.005
WORKS = (
    Work("paced", 1, 40, tokens=32),
    Work("paced", 64, 3, tokens=64),
    Work("paced", 256, 1, tokens=64),
    Work("one-token requests", 64, 10, tokens=1),
)
PYTHON, OLDER, NEWER = "Python", "Rust, smg 1.13.0", "Rust, newer build"


class Server(served.Server):
    """Prints `serving on grpc://ADDRESS`, and ends with SIGTERM too."""

    stderr = subprocess.STDOUT

    def __init__(self, command: list[str], env: Mapping[str, str]) -> None:
        path = filter(None, (env.get("PYTHONPATH"), str(ROOT), str(ROOT / "src")))
        super().__init__(command, path, env)

    @cached_property
    def address(self) -> str:
        return self.until(r"serving on grpc://(\S+)")

    @property
    def cpu(self) -> float:
        return cpu_seconds(self.child.pid)

    @property
    def megabytes(self) -> float:
        """Resident memory."""
        fields = Path(f"/proc/{self.child.pid}/statm").read_text().split()
        return int(fields[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20

    def close(self) -> None:
        self.child.terminate()
        super().close()


def servers(stack: ExitStack, folder: Path) -> dict[str, Server]:
    model = folder / "model"
    asyncio.run(real_vllm.run_module(folder, "tests.support.tiny_vllm", str(model)))
    flags = ["--pace", str(PACE)]
    rust = [os.environ["SMG_RUST_PYTHON"], "-m", "tests.support.rust_child", "--", *flags]
    env = {"SMG_ZMQ_SOCKET_DIR": str(folder / "s"), "PYTHONUNBUFFERED": "1"}
    script = str(ROOT / "benchmarks" / "rust_path_server.py")
    python = [sys.executable, script, str(model), str(folder), *flags]
    found = {
        PYTHON: Server(python, real_vllm.environment(folder)),
        OLDER: Server(rust, env),
        NEWER: Server(rust, env | {"PYTHONPATH": packages_of("SMG_NEWER_BINDING")}),
    }
    for server in found.values():
        stack.callback(server.close)
    return found


def measure(rounds: int) -> tuple[Loads, dict[str, float]]:
    def one(_name: str, server: Server, work: Work) -> Load:
        return asyncio.run(measured(server, work, replace(work, requests=1, tokens=2)))

    folder = Path(tempfile.mkdtemp(prefix="smg-"))
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder)
        running = servers(stack, folder)
        seen = take_turns(running, WORKS, rounds, one)
        return seen, {name: server.megabytes for name, server in running.items()}


def table(seen: Loads, memory: Mapping[str, float]) -> None:
    names = (PYTHON, OLDER, NEWER)
    print(f"| load | streams | | {' | '.join(names)} |\n|---|---|---|{'---|' * len(names)}")
    for (load, streams), row in seen.items():
        one = load == "one-token requests"
        cpu = [
            median([each.request_us if one else each.token_us for each in row[n]]) for n in names
        ]
        first = [median([each.ttft(0.5) for each in row[n]]) for n in names]
        last = [median([each.ttft(0.99) for each in row[n]]) for n in names]
        rate = [median([each.tokens / each.seconds for each in row[n]]) for n in names]
        unit = "request" if one else "token"
        for what, cells in (
            (f"CPU of a {unit}, us", [f"{value:.1f}" for value in cpu]),
            (
                "time to first token, median and p99, ms",
                [f"{a:.1f}, {b:.1f}" for a, b in zip(first, last, strict=True)],
            ),
            ("tokens a second", [f"{value:,.0f}" for value in rate]),
        ):
            print(f"| {load} | {streams} | {what} | {' | '.join(cells)} |")
    print(f"| | | memory, MB | {' | '.join(f'{memory[name]:.0f}' for name in names)} |")


def targets(seen: Loads) -> list[Target]:
    found: list[Target] = []
    for streams in (64, 256):
        row = seen["paced", streams]
        for name in (OLDER, NEWER):
            pairs = zip(row[name], row[PYTHON], strict=True)
            value = median([rust.token_us / python.token_us for rust, python in pairs])
            found.append((f"{name}, {streams} streams, CPU of Python's", value, "<=", 0.5))
    return found


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=3)
    seen, memory = measure(parser.parse_args().rounds)
    table(seen, memory)
    return 0 if report(targets(seen)) else 1


if __name__ == "__main__":
    sys.exit(main())
