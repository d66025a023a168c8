"""Training batches: chats drawn at random, laid end to end, so that a later one reads as a later
turn of the same conversation and the model learns to answer at any place in its context.

Every draw comes from one `random.Random`: the same seed gives the same batches.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .chat import ASSISTANT, END_OF_TEXT, render
from .corpus import SYSTEM_PROMPTS, Answer

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_CONTEXT_WEIGHT = 0.1
"""What a token outside an answer counts in the loss: questions are random, answers are not."""
_SYSTEM_SHARE, _PLAIN_SHARE = 0.15, 0.05


@dataclass(frozen=True, slots=True)
class Piece:
    """Token ids; those from `answer_at` on are what the model is to say."""

    ids: tuple[int, ...]
    answer_at: int


@dataclass(frozen=True, slots=True)
class Batch:
    ids: list[list[int]]
    """rows of length + 1 tokens: inputs are all but the last, targets all but the first"""
    weights: list[list[float]]
    """rows of length weights, one per target"""


class Lessons:
    def __init__(self, answers: list[Answer], tokenizer: Tokenizer, rng: random.Random) -> None:
        self._rng = rng
        self._chats = [[_chat(tokenizer, q, a.text) for q in a.questions] for a in answers]
        self._draws = [i for i, a in enumerate(answers) for _ in range(a.weight)]
        self._plain = [_plain(tokenizer, a.text) for a in answers]
        self._systems = [_context(tokenizer, render("system", text)) for text in SYSTEM_PROMPTS]

    def batch(self, rows: int, length: int) -> Batch:
        drawn = [self._row(length) for _ in range(rows)]
        return Batch([ids for ids, _ in drawn], [weights for _, weights in drawn])

    def _row(self, length: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) <= length:
            for piece in self._draw():
                ids += piece.ids
                said = len(piece.ids) - piece.answer_at
                weights += [_CONTEXT_WEIGHT] * piece.answer_at + [1.0] * said
        return ids[: length + 1], weights[1 : length + 1]

    def _draw(self) -> list[Piece]:
        which = self._rng.choice(self._draws)
        chance = self._rng.random()
        if chance < _PLAIN_SHARE:
            return [self._plain[which]]
        chat = self._rng.choice(self._chats[which])
        if chance < _PLAIN_SHARE + _SYSTEM_SHARE:
            return [self._rng.choice(self._systems), chat]
        return [chat]


def _chat(tokenizer: Tokenizer, question: str, answer: str) -> Piece:
    before = tokenizer.encode(render("user", question) + ASSISTANT).ids
    said = tokenizer.encode(render("assistant", answer)).ids[len(tokenizer.encode(ASSISTANT).ids) :]
    return Piece((*before, *said), len(before))


def _plain(tokenizer: Tokenizer, text: str) -> Piece:
    return _context(tokenizer, text + END_OF_TEXT)


def _context(tokenizer: Tokenizer, text: str) -> Piece:
    ids = tuple(tokenizer.encode(text).ids)
    return Piece(ids, len(ids))
