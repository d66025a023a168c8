"""SGLang's Python servicer over a stub scheduler, beside the published package, in one run.

    python benchmarks/sglang_servicer.py [--published FOLDER] [--rounds 3]

FOLDER is what `pip install --no-deps --target FOLDER smg-grpc-servicer` made. The scheduler is a
process of its own behind SGLang's sockets, with SGLang's message classes; the servers take turns
under the same client: a bare grpc.aio handler, the published servicer, ours. CPU is the server
process's own, receiving included. Two paces: `paced` leaves every server time to send each token
by itself; `ahead` does not, so that what piles up goes out together where a server can do that.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support import median
from smg_grpc_servicer.testing.dialects import DIALECTS

ROOT = Path(__file__).parent.parent
CPU_ONLY = ROOT / "tests" / "support" / "sglang_cpu"
"""SGLang's stand-ins for what has no CPU build."""
DIALECT = DIALECTS["sglang"]
PACED_TOKEN_SECONDS = 300e-6
"""What a paced server has for a token of one stream; the published one takes about a third."""
AHEAD_TOKEN_SECONDS = 20e-6
TARGETS = {
    ("paced", 1): 0.7,
    ("ahead", 16): 0.5,
    ("ahead", 64): 0.5,
    ("ahead", 256): 0.5,
    ("ahead, top 5 logprobs", 64): 0.4,
}
"""Most that ours may take of what the published servicer takes. The other loads have none: with one
message for each token, the bare handler itself takes about half of it.
"""
_serial = count()


@dataclass(frozen=True)
class Work:
    """One kind of load: so many streams, each so many requests one after another."""

    name: str
    streams: int
    requests: int
    tokens: int = 256
    top: int | None = None

    @property
    def ahead(self) -> bool:
        return self.name.startswith("ahead")

    @property
    def step_seconds(self) -> float:
        if self.ahead:
            return max(AHEAD_TOKEN_SECONDS * self.streams, 0.0003)
        return max(PACED_TOKEN_SECONDS * self.streams, 0.001)


WORKS = (
    Work("paced", 1, 8),
    Work("paced", 16, 2),
    Work("paced", 64, 1, tokens=128),
    Work("paced", 256, 1, tokens=64),
    Work("ahead", 16, 4),
    Work("ahead", 64, 2),
    Work("ahead", 256, 1),
    Work("ahead, top 5 logprobs", 64, 1, top=5),
)


@dataclass
class Load:
    """What one load cost and gave."""

    tokens: int = 0
    messages: int = 0
    cpu: float = 0.0
    seconds: float = 0.0

    @property
    def token_us(self) -> float:
        return self.cpu / self.tokens * 1e6


class Server:
    """A child that runs `sglang_server.py`."""

    def __init__(self, kind: str, package: Path, model: str) -> None:
        path = os.pathsep.join(map(str, (package, CPU_ONLY, ROOT)))
        env = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("sglang_server.py")), kind, model],
            env={**os.environ, **env, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=None if "BENCH_DEBUG" in os.environ else subprocess.DEVNULL,
            text=True,
        )

    def ready(self) -> None:
        self.address = f"127.0.0.1:{self._answer('port')}"

    def tell(self, words: str) -> float:
        """Its CPU seconds after it has done so."""
        assert self._child.stdin is not None
        self._child.stdin.write(words + "\n")
        self._child.stdin.flush()
        return float(self._answer("cpu"))

    def _answer(self, name: str) -> str:
        assert self._child.stdout is not None
        for line in self._child.stdout:
            if line.startswith(f"{name} "):
                return line.split()[1]
        raise SystemExit(f"a server ended with {self._child.wait()}")

    def close(self) -> None:
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(10)
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()


async def run(stub: Any, work: Work, load: Load) -> None:
    options: dict[str, Any] = {"max_tokens": work.tokens, "ignore_eos": True}

    async def one() -> None:
        for _ in range(work.requests):
            request = DIALECT.generate(f"b-{next(_serial)}", [5, 6, 7], **options)
            request.sampling_params.temperature = 1.0
            if work.top is not None:
                request.return_logprob = True
                request.top_logprobs_num = work.top
                request.logprob_start_len = -1
            async for message in stub.Generate(request):
                load.messages += 1
                load.tokens += len(message.chunk.token_ids)

    await asyncio.gather(*(one() for _ in range(work.streams)))


async def measured(server: Server, work: Work) -> Load:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = DIALECT.stub(channel)
        server.tell(f"mode {work.step_seconds} {'ahead' if work.ahead else 'paced'}")
        await run(stub, Work("warm", 1, 1, 8, work.top), Load())
        load = Load()
        before, start = server.tell("cpu"), perf_counter()
        await run(stub, work, load)
        load.seconds = perf_counter() - start
        load.cpu = server.tell("cpu") - before
    return load


Loads = dict[tuple[str, int], dict[str, list[Load]]]


def measure(published: Path | None, rounds: int, model: str) -> Loads:
    with ExitStack() as stack:
        kinds = {"bare": ROOT / "src", "ours": ROOT / "src"}
        if published is not None:
            kinds["published"] = published
        servers = {name: Server(name, package, model) for name, package in kinds.items()}
        for server in servers.values():
            stack.callback(server.close)
        for server in servers.values():
            server.ready()
        seen: Loads = defaultdict(lambda: defaultdict(list))
        for _ in range(rounds):
            for work in WORKS:
                for name, server in servers.items():
                    load = asyncio.run(measured(server, work))
                    seen[work.name, work.streams][name].append(load)
        return seen


def table(seen: Loads) -> bool:
    """Whether every target was met."""
    met = True
    print("| load | streams | CPU a token, us: bare | ours | published | ours / published | sent |")
    print("|---|---|---|---|---|---|---|")
    for (load, streams), row in seen.items():
        costs = {name: median([each.token_us for each in loads]) for name, loads in row.items()}
        ratio = costs["ours"] / costs["published"] if "published" in costs else None
        target = TARGETS.get((load, streams))
        met = met and (ratio is None or target is None or ratio <= target)
        shown = "-" if ratio is None else f"{ratio:.2f}" + (f" (<= {target})" if target else "")
        sent = sum(each.messages for each in row["ours"]) / sum(e.tokens for e in row["ours"])
        cells = [f"{costs[n]:.1f}" if n in costs else "-" for n in ("bare", "ours", "published")]
        print(f"| {load} | {streams} | {' | '.join(cells)} | {shown} | {sent:.2f} a token |")
    return met


def tiny_model(folder: Path) -> str:
    subprocess.run(
        [sys.executable, "-m", "tests.support.tiny_sglang", "llama", str(folder / "model")],
        check=True,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, (CPU_ONLY, ROOT)))},
        stdout=subprocess.DEVNULL,
    )
    return str(folder / "model")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--published", type=Path)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        met = table(measure(options.published, options.rounds, tiny_model(Path(folder))))
    return 0 if met else 1


if __name__ == "__main__":
    sys.exit(main())
