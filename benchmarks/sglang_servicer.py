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
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks import served
from benchmarks.served import ROOT, Load, Loads, Server, measured, take_turns
from benchmarks.support import median
from smg_grpc_servicer.testing.dialects import DIALECTS

CPU_ONLY = ROOT / "tests" / "support" / "sglang_cpu"
"""SGLang's stand-ins for what has no CPU build."""
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


@dataclass(frozen=True)
class Work(served.Work):
    """A scheduler's pace goes by the name."""

    top: int | None = None

    dialect = DIALECTS["sglang"]

    def request(self, request_id: str) -> Any:
        request = self.dialect.generate(
            request_id, [5, 6, 7], max_tokens=self.tokens, ignore_eos=True
        )
        request.sampling_params.temperature = 1.0
        if self.top is not None:
            request.return_logprob = True
            request.top_logprobs_num = self.top
            request.logprob_start_len = -1
        return request

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


def measure(published: Path | None, rounds: int, model: str) -> Loads:
    def one(_name: str, server: Server, work: Work) -> Load:
        server.tell(f"mode {work.step_seconds} {'ahead' if work.ahead else 'paced'}")
        return asyncio.run(measured(server, work))

    kinds = {"bare": ROOT / "src", "ours": ROOT / "src"}
    if published is not None:
        kinds["published"] = published
    script = str(Path(__file__).with_name("sglang_server.py"))
    env = {"SGLANG_USE_CPU_ENGINE": "1", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    with ExitStack() as stack:
        servers = {}
        for name, package in kinds.items():
            command = [sys.executable, script, name, model]
            servers[name] = Server(command, (package, CPU_ONLY, ROOT), env)
            stack.callback(servers[name].close)
        return take_turns(servers, WORKS, rounds, one)


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
