"""What `vllm serve --grpc` costs its launcher process on the CPU engine: ours, then the published.

One engine at a time: two would fight for the cores. They take turns, twice each, since what a
shared machine does beside them changes with the minutes.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path
from typing import Any

import grpc

from benchmarks.served import Load, Target, run
from benchmarks.support import free_port, median
from benchmarks.vllm_servicer import Work
from tests.support import real, real_vllm
from tests.support.servers import ROOT, Server

STREAMS = (64, 256)
TURNS = 2
FLAGS = (
    "--max-model-len",
    "1024",
    "--max-num-seqs",
    "256",
    "--enforce-eager",
    "--dtype",
    "float32",
)


def cpu_seconds(pid: int) -> float:
    """Of that process alone, not of its children; Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


async def served(
    home: Path, model: Path, package: Path, rounds: int, seen: dict[int, list[Load]]
) -> None:
    path = os.pathsep.join((str(package), real_vllm.environment(home)["PYTHONPATH"]))
    env = real_vllm.environment(home) | {"PYTHONPATH": path}
    # The published server says nothing when it listens, so its port is chosen here.
    port = free_port()
    where = ("--host", "127.0.0.1", "--port", str(port))
    server = Server([real_vllm.command(), "serve", str(model), "--grpc", *where, *FLAGS], env)
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            stub = Work.dialect.stub(channel)
            await ready(stub, server)
            for _ in range(rounds):
                for streams in STREAMS:
                    load = Load()
                    before = cpu_seconds(server.pid)
                    await run(stub, Work("real", streams, 1, 64), load)
                    load.cpu = cpu_seconds(server.pid) - before
                    seen[streams].append(load)
    finally:
        await real.end(server)


async def ready(stub: Any, server: Server) -> None:
    """Until it generates; a server that ends instead ends the benchmark with what it said."""
    while True:
        if not server.running:
            raise SystemExit(f"the server ended:\n{server.log}")
        try:
            await run(stub, Work("warm", 1, 1, 2), Load())
        except grpc.RpcError:
            await asyncio.sleep(0.5)
        else:
            return


async def real_targets(published: Path | None, rounds: int) -> list[Target]:
    seen: dict[str, dict[int, list[Load]]] = {}
    packages = {"ours": ROOT / "src", **({"published": published} if published else {})}
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model = home / "model"
        await real_vllm.run_module(home, "tests.support.tiny_vllm", str(model))
        for name in packages:
            seen[name] = {streams: [] for streams in STREAMS}
        for _ in range(TURNS):
            for name, package in packages.items():
                await served(home, model, package, rounds, seen[name])
    found: list[Target] = []
    print(f"\n| vLLM's CPU engine, streams | {' | '.join(seen)} |")
    print(f"|---|{'---|' * len(seen)}")
    for streams in STREAMS:
        costs = {
            name: median([load.token_us for load in row[streams]]) for name, row in seen.items()
        }
        cells = " | ".join(f"{cost:.0f} us a token" for cost in costs.values())
        print(f"| {streams} | {cells} |")
        value = costs["ours"] / costs["published"] if "published" in costs else None
        found.append((f"real engine, launcher CPU, {streams}, of published", value, "<=", 0.7))
    return found
