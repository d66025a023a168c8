"""The model behind `--model demo`: it ships in the package, so a first run needs no download.

It answers, greedily and always alike, what a Python built-in does. What it was trained on, under
which licence and how stands in NOTICE beside this file. Importing this costs no engine.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

_HERE = Path(__file__).parent


class Example(NamedTuple):
    question: str
    answer: str


def path() -> Path:
    """The directory to hand to `mlx_lm.load`. It must lie on disk: a zipped package has none."""
    return _HERE / "model"


def examples() -> tuple[Example, ...]:
    """Questions the model answers word for word, as one user message, decoded greedily."""
    pairs = json.loads((_HERE / "examples.json").read_text(encoding="utf-8"))
    return tuple(Example(pair["question"], pair["answer"]) for pair in pairs)
