"""vLLM's Python servicer over a stub engine, beside the published package, in one run.

    python benchmarks/vllm_servicer.py [--published FOLDER] [--rounds 3] [--real]

FOLDER is what `pip install --no-deps --target FOLDER smg-grpc-servicer` made. Servers take turns
under the same client: a bare grpc.aio handler, the published servicer, ours, and ours held to one
token per message; see `vllm_server.py` for their engines. CPU is the server process's own.
With `--real`, also the launcher process of `vllm serve --grpc` on vLLM's CPU engine.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
from collections import defaultdict
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any

import grpc

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.support import median
from smg_grpc_servicer.testing.dialects import DIALECTS

ROOT = Path(__file__).parent.parent
DIALECT = DIALECTS["vllm"]
TOKENS = 256
"""Of one request, but for the one-token requests."""
_serial = count()


@dataclass
class Load:
    """What one load cost and gave; times are seconds."""

    tokens: int = 0
    requests: int = 0
    messages: int = 0
    cpu: float = 0.0
    first: list[float] = field(default_factory=list)
    """Time to first token of each request."""

    @property
    def token_us(self) -> float:
        return self.cpu / self.tokens * 1e6

    @property
    def request_us(self) -> float:
        return self.cpu / self.requests * 1e6

    def ttft(self, share: float) -> float:
        """A quantile in milliseconds."""
        times = sorted(self.first)
        return times[min(int(len(times) * share), len(times) - 1)] * 1000


@dataclass(frozen=True)
class Work:
    """One kind of load: so many streams, each so many requests one after another."""

    name: str
    mode: str
    streams: int
    requests: int
    tokens: int = TOKENS
    logprobs: int | None = None


WORKS = (
    *(Work("instant", "instant", n, max(1, 64 // n)) for n in (1, 16, 64, 256)),
    *(Work("steps", "steps", n, max(1, 128 // n)) for n in (1, 64, 256)),
    Work("logprobs=20", "instant", 64, 1, logprobs=20),
    Work("one-token requests", "requests", 64, 20, tokens=1),
    Work("paced", "paced", 1, 100, tokens=4),
    Work("paced", "paced", 64, 4, tokens=32),
)

ONE = "ours, one token"
"""Ours, held to one token per message."""


class Server:
    """A child that runs `vllm_server.py`."""

    def __init__(self, kind: str, package: Path, **env: str) -> None:
        path = os.pathsep.join((str(package), str(ROOT)))
        self._child = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("vllm_server.py")), kind],
            env={**os.environ, **env, "PYTHONPATH": path},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
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
        self._child.kill()
        self._child.wait()


async def run(stub: Any, work: Work, load: Load) -> None:
    """All of a load; what it cost is the caller's to ask."""
    options: dict[str, Any] = {"max_tokens": work.tokens, "ignore_eos": True}
    if work.logprobs is not None:
        options["logprobs"] = work.logprobs

    async def one() -> None:
        for _ in range(work.requests):
            request = DIALECT.generate(f"b-{next(_serial)}", [5, 6, 7], **options)
            start = perf_counter()
            first = None
            async for message in stub.Generate(request):
                if first is None:
                    first = perf_counter() - start
                load.messages += 1
                load.tokens += len(message.chunk.token_ids)
            load.requests += 1
            load.first.append(first or 0.0)

    await asyncio.gather(*(one() for _ in range(work.streams)))


async def measured(server: Server, work: Work) -> Load:
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = DIALECT.stub(channel)
        server.tell(f"mode {work.mode}")
        await run(stub, Work("warm", work.mode, 1, 1, 8, work.logprobs), Load())
        load = Load()
        before = server.tell("cpu")
        await run(stub, work, load)
        load.cpu = server.tell("cpu") - before
    return load


Loads = dict[tuple[str, int], dict[str, list[Load]]]


def measure(published: Path | None, rounds: int) -> Loads:
    with ExitStack() as stack:
        servers: dict[str, Server] = {}
        kinds: list[tuple[str, str, Path, dict[str, str]]] = [
            ("bare", "bare", ROOT / "src", {}),
            ("ours", "servicer", ROOT / "src", {}),
            (ONE, "servicer", ROOT / "src", {"SMG_SERVICER_MAX_CHUNK_TOKENS": "1"}),
        ]
        if published is not None:
            kinds.append(("published", "servicer", published, {}))
        for name, kind, package, env in kinds:
            servers[name] = Server(kind, package, **env)
            stack.callback(servers[name].close)
        seen: Loads = defaultdict(lambda: defaultdict(list))
        for _ in range(rounds):
            for work in WORKS:
                for name, server in servers.items():
                    if name != ONE or work.name == "instant":
                        load = asyncio.run(measured(server, work))
                        seen[work.name, work.streams][name].append(load)
        return seen


def table(seen: Loads) -> None:
    names = ("bare", ONE, "ours", "published")
    print(f"| load | streams | CPU of | {' | '.join(names)} |")
    print(f"|---|---|---|{'---|' * len(names)}")
    for (load, streams), row in seen.items():
        one = load == "one-token requests"
        cells = []
        for name in names:
            values = [each.request_us if one else each.token_us for each in row.get(name, ())]
            cells.append(f"{median(values):.1f}" if values else "-")
        unit = "a request, us" if one else "a token, us"
        print(f"| {load} | {streams} | {unit} | {' | '.join(cells)} |")
    print(f"\n| time to first token, ms | streams | {' | '.join(names)} |")
    print(f"|---|---|{'---|' * len(names)}")
    for streams in (1, 64):
        row = seen["paced", streams]
        for share in (0.5, 0.99):
            cells = [
                f"{median([each.ttft(share) for each in row[name]]):.2f}" if row.get(name) else "-"
                for name in names
            ]
            print(f"| p{share * 100:.0f} | {streams} | {' | '.join(cells)} |")


Target = tuple[str, float | None, str, float]


def targets(seen: Loads) -> list[Target]:
    """Name, measured, direction, bound; a ratio is taken round by round."""

    def ratio(load: str, streams: int, mine: str, other: str, what: Any) -> float | None:
        row = seen[load, streams]
        pairs = zip(row.get(mine, ()), row.get(other, ()), strict=False)
        values = [what(a) / what(b) for a, b in pairs]
        return median(values) if values else None

    def cpu(load: Load) -> float:
        return load.token_us

    found: list[Target] = []
    for streams in (16, 64, 256):
        of_published = ratio("instant", streams, ONE, "published", cpu)
        found.append((f"one token a message, {streams}, of published", of_published, "<=", 0.7))
        of_bare = ratio("instant", streams, ONE, "bare", cpu)
        found.append((f"one token a message, {streams}, of bare", of_bare, "<=", 1.3))
    for load, streams, bound in (("instant", 64, 4.0), ("instant", 256, 4.0), ("steps", 256, 1.5)):
        value = ratio(load, streams, "published", "ours", cpu)
        found.append((f"{load}, tokens per CPU s, {streams}, of published", value, ">=", bound))
    value = ratio("logprobs=20", 64, "ours", "published", cpu)
    found.append(("logprobs=20, CPU a token, of published", value, "<=", 0.4))
    value = ratio("one-token requests", 64, "ours", "published", lambda load: load.request_us)
    found.append(("one-token requests, CPU, of published", value, "<=", 0.6))
    for streams in (1, 64):
        for share in (0.5, 0.99):
            value = ratio("paced", streams, "ours", "published", lambda load, s=share: load.ttft(s))
            # "Not worse", less what the clock of a shared machine allows to tell.
            found.append((f"TTFT p{share * 100:.0f}, {streams}, of published", value, "<=", 1.05))
    return found


def report(found: list[Target]) -> bool:
    """Print the targets; whether all hold."""
    print("\n| target | wanted | measured | |")
    print("|---|---|---|---|")
    good = True
    for name, value, sign, bound in found:
        if value is None:
            print(f"| {name} | {sign} {bound} | not measured | |")
            continue
        holds = value >= bound if sign == ">=" else value <= bound
        good = good and holds
        print(f"| {name} | {sign} {bound} | {value:.2f} | {'holds' if holds else 'MISSED'} |")
    return good


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="the published package")
    parser.add_argument("--rounds", type=int, default=3, help="each; the median counts (3)")
    parser.add_argument(
        "--real", action="store_true", help="also vLLM's CPU engine; 4 minutes more"
    )
    args = parser.parse_args()
    seen = measure(args.published, args.rounds)
    table(seen)
    found = targets(seen)
    if args.real:
        from benchmarks.vllm_real import real_targets

        found += asyncio.run(real_targets(args.published, args.rounds))
    raise SystemExit(0 if report(found) else 1)


if __name__ == "__main__":
    main()
