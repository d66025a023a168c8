"""Requests that are asked twice: of vLLM offline, and of its gRPC server.

Sampling parameters have vLLM's own names, which are also those of the proto. Times do not matter,
ids do.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import Any

VOCAB = 1024
FIRST_ORDINARY = 3
"""The ids below are the tokenizer's alphabet; any id makes a prompt for a model of noise."""

SCHEMA = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"enum": ["paris", "tokyo"]}, "hot": {"type": "boolean"}},
        "required": ["city", "hot"],
        "additionalProperties": False,
    }
)
TAG = json.dumps(
    {
        "type": "structural_tag",
        "format": {
            "type": "tag",
            "begin": "<tool_call>",
            "content": {"type": "regex", "pattern": "(one|two)"},
            "end": "</tool_call>",
        },
    }
)


@dataclass(frozen=True)
class Case:
    """One request."""

    prompt: list[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    constraint: dict[str, Any] = field(default_factory=dict)
    """One field of the proto's oneof; vLLM has them in `StructuredOutputsParams`."""

    @property
    def grpc(self) -> dict[str, Any]:
        """As options of a dialect's `generate`."""
        return {**self.sampling, **self.constraint}


def prompt(length: int, seed: int = 0) -> list[int]:
    dice = random.Random(f"{length}/{seed}")
    return [dice.randrange(FIRST_ORDINARY, 900) for _ in range(length)]


def _greedy(count: int) -> dict[str, Any]:
    return {"temperature": 0.0, "max_tokens": count, "ignore_eos": True}


PROMPTS = [prompt(1 + 9 * at, seed=1) for at in range(20)]

GREEDY = {f"greedy {at}": Case(ids, _greedy(24)) for at, ids in enumerate(PROMPTS)}
LOGPROBS = {
    f"logprobs {at}": Case(ids, {**_greedy(24), "logprobs": at % 6})
    for at, ids in enumerate(PROMPTS)
}
SAMPLED = {
    "seed": Case(prompt(10, 2), {"temperature": 1.0, "seed": 42, "max_tokens": 24}),
    "seed 0": Case(prompt(10, 2), {"temperature": 1.0, "seed": 0, "max_tokens": 24}),
    "two choices": Case(prompt(11, 2), {"temperature": 1.0, "seed": 7, "max_tokens": 16, "n": 2}),
    "filters": Case(
        prompt(12, 2),
        {
            "temperature": 0.8, "seed": 3, "max_tokens": 24, "top_k": 20, "top_p": 0.9,
            "min_p": 0.01, "frequency_penalty": 0.5, "presence_penalty": 0.25,
            "repetition_penalty": 1.2,
        },
    ),
    "bias": Case(prompt(13, 2), {**_greedy(6), "logit_bias": {77: 100.0}}),
    "min_tokens": Case(
        prompt(14, 2), {"temperature": 1.0, "seed": 5, "max_tokens": 200, "min_tokens": 60}
    ),
}  # fmt: skip
CONSTRAINED = {
    "json_schema": Case(
        prompt(10, 3), _greedy(60) | {"ignore_eos": False}, {"json_schema": SCHEMA}
    ),
    "regex": Case(
        prompt(10, 4), _greedy(20) | {"ignore_eos": False}, {"regex": "[a-d]{3}-[0-9]{2}"}
    ),
    "choice": Case(
        prompt(10, 5), _greedy(20) | {"ignore_eos": False}, {"choice": ["red", "green", "blue"]}
    ),
    "grammar": Case(
        prompt(10, 6),
        _greedy(20) | {"ignore_eos": False},
        {"grammar": 'root ::= "yes " word\nword ::= "sir" | "madam"'},
    ),
    "structural_tag": Case(
        prompt(10, 7), _greedy(40) | {"ignore_eos": False}, {"structural_tag": TAG}
    ),
    "json_object": Case(prompt(10, 8), _greedy(40), {"json_object": True}),
}
PROMPT_LOGPROBS = {
    "prompt_logprobs": Case(prompt(10, 9), {**_greedy(2), "prompt_logprobs": 2}),
    "all prompt_logprobs": Case(prompt(5, 9), {**_greedy(1), "prompt_logprobs": -1}),
    "all logprobs": Case(prompt(6, 9), {**_greedy(3), "logprobs": -1}),
}

CASES = {**GREEDY, **LOGPROBS, **SAMPLED, **CONSTRAINED, **PROMPT_LOGPROBS}
