"""Requests that are asked twice: of SGLang's own Engine, and of the gRPC server over it.

`sampling` has vLLM's names, as `Dialect.generate` takes them.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

VOCAB = 1024
FIRST_ORDINARY = 3

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["paris", "tokyo"]}, "hot": {"type": "boolean"}},
        "required": ["city", "hot"],
        "additionalProperties": False,
    }
)


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    logprobs: int | None = None
    """Best of each position, output and prompt."""


def prompt(length: int, seed: int = 0) -> list[int]:
    dice = random.Random(f"{length}/{seed}")
    return [dice.randrange(FIRST_ORDINARY, 900) for _ in range(length)]


def _greedy(count: int, **more: Any) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": count, "ignore_eos": True, **more}


PROMPTS = [prompt(1 + 9 * at, seed=1) for at in range(12)]

GREEDY = {f"greedy {at}": Case(ids, _greedy(24)) for at, ids in enumerate(PROMPTS)}
LOGPROBS = {f"logprobs {at}": Case(prompt(7 + at, 2), _greedy(6), logprobs=at) for at in range(4)}
SHAPED = {
    "penalties": Case(
        prompt(12, 2),
        _greedy(16, frequency_penalty=0.5, presence_penalty=0.25, repetition_penalty=1.2),
    ),
    "bias": Case(prompt(13, 2), _greedy(6, logit_bias={77: 100.0})),
    "min_tokens": Case(prompt(14, 2), _greedy(30, min_tokens=20, ignore_eos=False)),
}
CONSTRAINED = {
    "json_schema": Case(prompt(10, 3), _greedy(60, ignore_eos=False, json_schema=SCHEMA)),
    "regex": Case(prompt(10, 4), _greedy(20, ignore_eos=False, regex="[a-d]{3}-[0-9]{2}")),
    "grammar": Case(
        prompt(10, 6),
        _greedy(20, ignore_eos=False, grammar='root ::= "yes " word\nword ::= "sir" | "madam"'),
    ),
}

BAD_PROFILES: dict[str, tuple[str, dict[str, Any]]] = {
    "no steps of a stage": ("num_steps", {"activities": ["CPU"], "profile_by_stage": True}),
    "less than no steps": ("num_steps", {"activities": ["CPU"], "num_steps": -1}),
    "a start in the past": ("start_step", {"activities": ["CPU"], "start_step": -1}),
    "no CUDA": ("activities", {"activities": ["CPU", "MEM"]}),
    "no CUDA profiler": ("activities", {"activities": ["CUDA_PROFILER"]}),
    "no ROCm": ("activities", {"activities": ["RPD"]}),
    "nothing known": ("activities", {"activities": ["nonsense"]}),
    "a folder that cannot be": ("output_dir", {"output_dir": "/proc/nope/x"}),
    "a folder that cannot be written to": ("output_dir", {"output_dir": "/proc/self"}),
    "nobody's home": ("output_dir", {"output_dir": "~nobody-of-this-name/x"}),
    "no path": ("output_dir", {"output_dir": "/tmp/a\0b"}),
}
"""Fields of a StartProfile that ended the scheduler or were not heard, with the one to blame."""

CASES = {**GREEDY, **LOGPROBS, **SHAPED, **CONSTRAINED}
