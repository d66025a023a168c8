"""vLLM's Python servicer over a stub engine, beside the published package, in one run.

    python benchmarks/vllm_servicer.py [--published FOLDER] [--rounds 3] [--real]

FOLDER is what `pip install --no-deps --target FOLDER smg-grpc-servicer` made. Servers take turns
under the same client: a bare grpc.aio handler, the published servicer, ours, ours held to one
token per message, and for short requests the least that goes through an engine on a server of
ours; see `vllm_server.py`. CPU is the server process's own.
With `--real`, also the launcher process of `vllm serve --grpc` on vLLM's CPU engine.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import served
from benchmarks.served import ROOT, Load, Loads, Server, Target, measured, report, take_turns
from benchmarks.support import median
from smg_grpc_servicer.testing.dialects import DIALECTS


@dataclass(frozen=True)
class Work(served.Work):
    """See `vllm_server.py` for the modes of its engine."""

    mode: str = "instant"
    logprobs: int | None = None

    dialect = DIALECTS["vllm"]

    def request(self, request_id: str) -> Any:
        options: dict[str, Any] = {"max_tokens": self.tokens, "ignore_eos": True}
        if self.logprobs is not None:
            options["logprobs"] = self.logprobs
        return self.dialect.generate(request_id, [5, 6, 7], **options)


SHORT = "one-token requests"

WORKS = (
    *(Work("instant", n, max(1, 64 // n)) for n in (1, 16, 64, 256)),
    *(Work("steps", n, max(2, 128 // n), mode="steps") for n in (1, 64, 256)),
    Work("logprobs=20", 64, 1, logprobs=20),
    Work(SHORT, 64, 20, tokens=1, mode="requests"),
    Work("paced", 1, 100, tokens=4, mode="paced"),
    Work("paced", 64, 4, tokens=32, mode="paced"),
)

ONE = "ours, one token"
"""Ours, held to one token per message."""


def measure(published: Path | None, rounds: int) -> Loads:
    only = {ONE: "instant", "least": SHORT}

    def one(name: str, server: Server, work: Work) -> Load | None:
        if name in only and work.name != only[name]:
            return None
        server.tell(f"mode {work.mode}")
        return asyncio.run(measured(server, work))

    ours = ROOT / "src"
    kinds: dict[str, tuple[str, Path, dict[str, str]]] = {
        "bare": ("bare", ours, {}),
        "least": ("least", ours, {}),
        "ours": ("servicer", ours, {}),
        ONE: ("servicer", ours, {"SMG_SERVICER_MAX_CHUNK_TOKENS": "1"}),
    }
    if published is not None:
        kinds["published"] = ("servicer", published, {})
    script = str(Path(__file__).with_name("vllm_server.py"))
    with ExitStack() as stack:
        servers = {}
        for name, (kind, package, env) in kinds.items():
            servers[name] = Server([sys.executable, script, kind], (package, ROOT), env)
            stack.callback(servers[name].close)
        return take_turns(servers, WORKS, rounds, one)


def table(seen: Loads) -> None:
    names = ("bare", "least", ONE, "ours", "published")
    print(f"| load | streams | CPU of | {' | '.join(names)} |")
    print(f"|---|---|---|{'---|' * len(names)}")
    for (load, streams), row in seen.items():
        one = load == SHORT
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


def targets(seen: Loads) -> list[Target]:
    """A ratio is taken round by round."""

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
    value = ratio(SHORT, 64, "ours", "published", lambda load: load.request_us)
    found.append(("one-token requests, CPU, of published", value, "<=", 0.6))
    for streams in (1, 64):
        for share in (0.5, 0.99):
            value = ratio("paced", streams, "ours", "published", lambda load, s=share: load.ttft(s))
            # "Not worse", less what the clock of a shared machine allows to tell.
            found.append((f"TTFT p{share * 100:.0f}, {streams}, of published", value, "<=", 1.05))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--published", type=Path, metavar="FOLDER", help="the published package")
    parser.add_argument("--rounds", type=int, default=3, help="each; the median counts (3)")
    parser.add_argument(
        "--real", action="store_true", help="also vLLM's CPU engine; 6 minutes more"
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
