"""Our MLX server beside mlx-lm's BatchGenerator and the published package, interleaved in one run.

    python benchmarks/mlx_engine.py [--published PYTHON] [--rounds 5]

PYTHON is the interpreter of a venv with the published smg-grpc-servicer[mlx]; it gets the same
float32 weights and, by LD_PRELOAD, the same BLAS. The model is a random 0.9 M-parameter Llama, so
that the server and not the model is what is measured.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from time import perf_counter
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent))

from benchmarks.served import Target, report
from benchmarks.support import (
    blas,
    free_port,
    median,
    ours,
    published,
    run_stream,
    server,
    throughput,
)
from tests.support.tiny_mlx import write_tiny_model

VOCAB = 1024
CONTEXT = 8192
TOKENS = 256
"""Of an answer: long enough for its tokens to count, not the sending of the requests."""
STREAMS = (1, 8, 32)

Values = dict[str, list[float]]


def prompt(length: int, seed: int) -> list[int]:
    generator = random.Random(seed)
    return [generator.randrange(3, VOCAB) for _ in range(length)]


class Direct:
    """The BatchGenerator child."""

    def __init__(self, model: str) -> None:
        script = str(Path(__file__).with_name("mlx_direct.py"))
        self._child = subprocess.Popen(
            [sys.executable, script, model],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        print("direct:", json.loads(self._line())["ready"], flush=True)

    async def rate(self, prompts: Sequence[Sequence[int]], temperature: float) -> float:
        wish = {"prompts": prompts, "tokens": TOKENS, "temperature": temperature}
        assert self._child.stdin is not None
        self._child.stdin.write(json.dumps(wish) + "\n")
        self._child.stdin.flush()
        answer: float = json.loads(await asyncio.to_thread(self._line))["rate"]
        return answer

    def close(self) -> None:
        self._child.kill()
        self._child.wait()

    def _line(self) -> str:
        assert self._child.stdout is not None
        return self._child.stdout.readline()


async def rates(
    stubs: dict[str, Any], direct: Direct, rounds: int
) -> dict[tuple[str, str], Values]:
    """Tokens a second: (streams and kind) → server → one value a round."""
    seen: dict[tuple[str, str], Values] = defaultdict(lambda: defaultdict(list))
    seed = 0
    for at in range(rounds + 1):
        for streams in STREAMS:
            for kind, temperature, logprobs in (
                ("greedy", 0.0, None),
                ("sampled", 1.0, None),
                ("logprobs=5", 0.0, 5),
            ):
                if kind != "greedy" and streams != STREAMS[-1]:
                    continue
                row: dict[str, float] = {}
                for name, stub in stubs.items():
                    # Other prompts for each: nobody profits from a prefix cache here.
                    seed += streams
                    prompts = [prompt(16, seed + each) for each in range(streams)]
                    row[name] = await throughput(
                        stub,
                        prompts,
                        max_tokens=TOKENS,
                        ignore_eos=True,
                        temperature=temperature,
                        logprobs=logprobs,
                    )
                if kind != "logprobs=5":
                    prompts = [prompt(16, seed + each) for each in range(streams)]
                    row["direct"] = await direct.rate(prompts, temperature)
                if at:  # The first round warms everybody up.
                    for name, value in row.items():
                        seen[f"{streams}", kind][name].append(value)
    return seen


async def gap_while_admitting(stub: Any, seed: int) -> float:
    """Worst gap of a running stream, in seconds, while a 2,000-token prompt is admitted."""
    running = asyncio.ensure_future(
        run_stream(stub, f"gap-{seed}", prompt(16, seed), max_tokens=1500, ignore_eos=True)
    )
    await asyncio.sleep(0.3)
    begin = perf_counter()
    await run_stream(stub, f"long-{seed}", prompt(2000, seed + 1), max_tokens=2, ignore_eos=True)
    end = perf_counter()
    stream = await running
    inside = [t for t in stream.times if begin <= t <= end]
    edges = [max((t for t in stream.times if t < begin), default=begin), *inside]
    after = [t for t in stream.times if t > end][:1]
    times = [*edges, *after]
    return max(b - a for a, b in pairwise(times))


async def ttft_behind_long(stub: Any, seed: int) -> float:
    """Mean seconds to the first token of four 10-token prompts sent with a 4,000-token one."""
    long = asyncio.ensure_future(
        run_stream(stub, f"big-{seed}", prompt(4000, seed), max_tokens=2, ignore_eos=True)
    )
    shorts = await asyncio.gather(
        *(
            run_stream(
                stub, f"small-{seed}-{at}", prompt(10, seed + at + 1), max_tokens=2, ignore_eos=True
            )
            for at in range(4)
        )
    )
    await long
    return sum(stream.ttft for stream in shorts) / len(shorts)


async def prefix(stub: Any, seed: int) -> tuple[float, float]:
    """Time to first token, in seconds, of an 820-token prompt: cold, then after its 800-prefix."""
    head = prompt(800, seed)
    times = []
    for at in range(2):
        tail = prompt(20, seed + 1 + at)
        stream = await run_stream(
            stub, f"p-{seed}-{at}", head + tail, max_tokens=4, ignore_eos=True
        )
        times.append(stream.ttft)
    return times[0], times[1]


async def measure(model: str, python: str | None, rounds: int) -> bool:
    direct = Direct(model)
    try:
        async with AsyncExitStack() as stack:
            stubs = {}
            port = free_port()
            stubs["ours"] = await stack.enter_async_context(server(ours(model, port), port))
            if python is not None:
                port, library = free_port(), blas()
                env = {"OPENBLAS_NUM_THREADS": "1", **({"LD_PRELOAD": library} if library else {})}
                stubs["published"] = await stack.enter_async_context(
                    server(published(python, model, port), port, env)
                )
            seen = await rates(stubs, direct, rounds)
            for name, stub in stubs.items():
                for at in range(min(rounds, 3)):
                    seed = 10_000 + 100 * at
                    seen["-", "worst gap, 2,000-token prompt admitted (s)"][name].append(
                        await gap_while_admitting(stub, seed)
                    )
                    seen["-", "TTFT of 10 tokens behind 4,000 (s)"][name].append(
                        await ttft_behind_long(stub, seed)
                    )
                    cold, warm = await prefix(stub, seed + 50)
                    seen["-", "TTFT of 820 tokens, cold (s)"][name].append(cold)
                    seen["-", "TTFT of 820 tokens, 800 seen before (s)"][name].append(warm)
    finally:
        direct.close()
    return told(seen)


def told(seen: dict[tuple[str, str], Values]) -> bool:
    """Print the table, then the targets; whether all of them hold."""
    print("\n| streams | what | ours | direct | published |")
    print("|---|---|---|---|---|")
    for (streams, kind), row in seen.items():
        cells = [
            f"{median(row[name]):.4g}" if row.get(name) else "-"
            for name in ("ours", "direct", "published")
        ]
        print(f"| {streams} | {kind} | {' | '.join(cells)} |")

    def ratio(key: tuple[str, str], over: str, under: str = "ours") -> float | None:
        mine, theirs = seen[key].get(under), seen[key].get(over)
        if not mine or not theirs:
            return None
        return median([a / b for a, b in zip(mine, theirs, strict=True)])

    cold, warm = "TTFT of 820 tokens, cold (s)", "TTFT of 820 tokens, 800 seen before (s)"
    logprobs = median(seen["32", "logprobs=5"]["ours"]) / median(seen["32", "greedy"]["ours"])
    targets: list[Target] = [
        *(
            (f"greedy, {n} streams, of direct", ratio((str(n), "greedy"), "direct"), ">=", 1.0)
            for n in STREAMS
        ),
        ("sampled, 32 streams, of direct", ratio(("32", "sampled"), "direct"), ">=", 1.3),
        ("greedy, 32 streams, of published", ratio(("32", "greedy"), "published"), ">=", 1.25),
        ("logprobs=5 of greedy, 32 streams", logprobs, ">=", 0.85),
        (
            "worst gap, of published",
            ratio(("-", "worst gap, 2,000-token prompt admitted (s)"), "published"),
            "<=",
            0.15,
        ),
        (
            "TTFT behind 4,000, of published",
            ratio(("-", "TTFT of 10 tokens behind 4,000 (s)"), "published"),
            "<=",
            0.05,
        ),
        (
            "repeated 800-token prefix, of cold",
            median(seen["-", warm]["ours"]) / median(seen["-", cold]["ours"]),
            "<=",
            0.2,
        ),
    ]
    return report(targets)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--published", metavar="PYTHON", help="python of the published package's venv"
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds after the warm-up (5)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = write_tiny_model(
            Path(folder) / "random", hidden=128, layers=4, vocab=VOCAB, ctx=CONTEXT
        )
        good = asyncio.run(measure(str(model), args.published, args.rounds))
    raise SystemExit(0 if good else 1)


if __name__ == "__main__":
    main()
