"""Trains the demo model, or counts how much of the corpus a model answers word for word.

    python -m smg_grpc_servicer.mlx.demo.train --out DIR --seconds 600
    python -m smg_grpc_servicer.mlx.demo.train --check DIR

With `--steps` the same seed gives the same run, up to the rounding of the linear algebra library;
with `--seconds` the schedule follows the clock. Exit code 1: fewer than 90 % of the facts asked
were answered exactly.
"""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from smg_grpc_servicer.mlx.backend import import_mlx, load_blas

from . import path
from .corpus import Corpus

if TYPE_CHECKING:
    from .trainer import Step, Trainer

_PASS_SHARE = 0.9
_REPORT_EVERY_S = 10.0


def show(trainer: Trainer) -> Step | None:
    """Runs it: a bar in a terminal, a line now and then elsewhere. The last step, if any."""
    from tqdm import tqdm

    last: Step | None = None
    said = 0.0
    with tqdm(total=1.0, disable=None, bar_format="{percentage:3.0f}% |{bar}| {desc}") as bar:
        for last in trainer.run():
            bar.update(last.progress - bar.n)
            bar.set_description_str(str(last))
            if bar.disable and last.elapsed - said >= _REPORT_EVERY_S:
                said = last.elapsed
                print(last, flush=True)
    return last


def train(out: Path, seconds: float, steps: int | None, seed: int) -> bool:
    """Whether it was trained at all: a budget of 0 writes random weights."""
    from .trainer import Plan, Trainer

    trainer = Trainer(Plan(seconds, steps, seed))
    last = show(trainer)
    trainer.save(out)
    size = sum(file.stat().st_size for file in out.iterdir())
    print(f"trained: {last}" if last else "not trained: random weights")
    print(f"{out}: {trainer.parameters} parameters, {size} bytes", flush=True)
    return last is not None


def check(directory: Path, count: int, seed: int) -> bool:
    from .check import misses, questions

    asked = questions(Corpus.read(), count, random.Random(seed))
    wrong = list(misses(directory, asked))
    for example, got in wrong:
        print(f"{example.question}\n  wanted {example.answer!r}\n  got    {got!r}")
    print(f"{len(asked) - len(wrong)} of {len(asked)} facts answered exactly")
    return len(wrong) <= (1 - _PASS_SHARE) * len(asked)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m smg_grpc_servicer.mlx.demo.train",
        description="Train the demo model, or check one.",
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, metavar="DIR", help="train, and write the model here")
    what.add_argument(
        "--check",
        type=Path,
        metavar="DIR",
        nargs="?",
        const=path(),
        help="count the facts a model answers exactly (default: the one that ships)",
    )
    budget = parser.add_mutually_exclusive_group()
    budget.add_argument(
        "--seconds",
        type=_not_negative,
        default=600.0,
        help="training time (600); 0: random weights",
    )
    budget.add_argument("--steps", type=_count, help="training steps, in place of --seconds")
    parser.add_argument("--seed", type=int, default=7, help="of weights, batches and checks (7)")
    parser.add_argument("--facts", type=_positive, default=100, help="how many facts to ask (100)")
    return parser.parse_args(arguments)


def _not_negative(text: str) -> float:
    value = float(text)
    if not 0 <= value < float("inf"):
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 0 or more seconds")
    return value


def _count(text: str) -> int:
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 0 or more")
    return value


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"got {text}, allowed: 1 or more")
    return value


def main(arguments: list[str] | None = None) -> int:
    chosen = parse(arguments)
    print(f"BLAS: {load_blas()}", flush=True)
    try:
        import_mlx()
    except ImportError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if chosen.out and not train(chosen.out, chosen.seconds, chosen.steps, chosen.seed):
        return 0
    return 0 if check(chosen.out or chosen.check, chosen.facts, chosen.seed) else 1


if __name__ == "__main__":
    sys.exit(main())
