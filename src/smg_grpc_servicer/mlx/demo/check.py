"""How much of the corpus a model directory answers word for word, decoded greedily."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import mlx_lm

from . import Example
from .corpus import FORMS, Corpus


def questions(corpus: Corpus, count: int, rng: random.Random) -> list[Example]:
    """`count` facts drawn without repetition, each asked in the first of its forms."""
    names = rng.sample(sorted(corpus.facts), min(count, len(corpus.facts)))
    return [Example(FORMS[0].format(name), corpus.facts[name]) for name in names]


def reply(model: Any, tokenizer: Any, question: str, max_tokens: int = 200) -> str:
    messages = [{"role": "user", "content": question}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    return str(mlx_lm.generate(model, tokenizer, prompt, max_tokens=max_tokens))


def misses(directory: Path, asked: Iterable[Example]) -> Iterator[tuple[Example, str]]:
    """The examples that came out otherwise, each with what came out."""
    model, tokenizer = mlx_lm.load(str(directory))[:2]
    for example in asked:
        got = reply(model, tokenizer, example.question)
        if got != example.answer:
            yield example, got
