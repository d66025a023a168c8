"""Servers as children that take turns under one client: what the servicers' benchmarks share.

CPU is a server process's own; times are seconds.
"""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import count
from pathlib import Path
from time import perf_counter
from typing import Any, ClassVar, TypeVar

import grpc

from smg_grpc_servicer.testing.dialects import Dialect

ROOT = Path(__file__).parent.parent
_serial = count()


@dataclass
class Load:
    """What one load cost and gave."""

    tokens: int = 0
    requests: int = 0
    messages: int = 0
    cpu: float = 0.0
    seconds: float = 0.0
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
class Work(ABC):
    """One kind of load: so many streams, each so many requests one after another."""

    name: str
    streams: int
    requests: int
    tokens: int = 256
    """Of one request."""

    dialect: ClassVar[Dialect]

    @abstractmethod
    def request(self, request_id: str) -> Any: ...


S = TypeVar("S", bound="Server")
W = TypeVar("W", bound=Work)
Loads = dict[tuple[str, int], dict[str, list[Load]]]
"""By a load's name and streams, then by server; one of each round."""


class Server:
    """A child that ends with its input."""

    stderr: int | None = None if "BENCH_DEBUG" in os.environ else subprocess.DEVNULL

    def __init__(
        self, command: Sequence[str], path: Iterable[str | Path], env: Mapping[str, str]
    ) -> None:
        self.child = subprocess.Popen(
            command,
            env={**os.environ, **env, "PYTHONPATH": os.pathsep.join(map(str, path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.stderr,
            text=True,
        )

    @cached_property
    def address(self) -> str:
        return f"127.0.0.1:{self.until('^port (.+)')}"

    @property
    def cpu(self) -> float:
        return self.tell("cpu")

    def tell(self, words: str) -> float:
        """Its CPU seconds after it has done so."""
        assert self.child.stdin is not None
        self.child.stdin.write(words + "\n")
        self.child.stdin.flush()
        return float(self.until("^cpu (.+)"))

    def until(self, pattern: str) -> str:
        """The group in the next line that has it."""
        assert self.child.stdout is not None
        said = []
        for line in self.child.stdout:
            if found := re.search(pattern, line):
                return found[1]
            said.append(line)
        raise SystemExit(f"a server ended with {self.child.wait()}:\n{''.join(said)}")

    def close(self) -> None:
        assert self.child.stdin is not None
        self.child.stdin.close()
        try:
            self.child.wait(15)
        except subprocess.TimeoutExpired:
            self.child.kill()
            self.child.wait()


async def run(stub: Any, work: Work, load: Load) -> None:
    """All of a load; what it cost is the caller's to ask."""

    async def one() -> None:
        for _ in range(work.requests):
            request = work.request(f"b-{next(_serial)}")
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


async def measured(server: Server, work: Work, warm: Work | None = None) -> Load:
    """:param warm: what goes ahead; one short request, unless it is given."""
    async with grpc.aio.insecure_channel(server.address) as channel:
        stub = work.dialect.stub(channel)
        await run(stub, warm or replace(work, streams=1, requests=1, tokens=8), Load())
        load = Load()
        before, start = server.cpu, perf_counter()
        await run(stub, work, load)
        load.seconds = perf_counter() - start
        load.cpu = server.cpu - before
    return load


def take_turns(
    servers: Mapping[str, S],
    works: Iterable[W],
    rounds: int,
    measure: Callable[[str, S, W], Load | None],
) -> Loads:
    """:param measure: of the server of that name; None where it takes no part."""
    for server in servers.values():
        _ = server.address  # all are ready
    seen: Loads = defaultdict(lambda: defaultdict(list))
    for _ in range(rounds):
        for work in works:
            for name, server in servers.items():
                if (load := measure(name, server, work)) is not None:
                    seen[work.name, work.streams][name].append(load)
    return seen


Target = tuple[str, float | None, str, float]
"""Name, measured, direction, bound."""


def report(found: Sequence[Target]) -> bool:
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
