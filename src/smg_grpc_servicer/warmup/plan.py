"""Which requests warm an engine up. Decisions only: nothing here sends, waits or reads a clock.

A kernel or graph is made at the first use of its shape, and there are two kinds of shapes: how many
requests decode together, and how many prompt tokens one step computes. So a plan has decode steps,
in which a batch shrinks over every size worth having, and prompts of many lengths. All ranks get
the same requests at the same time, because the ranks of one engine step together.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

PROMPT = 8
"""Tokens of a prompt that is only there to decode."""
SETTLE = 8
"""Decode steps until all requests of a batch have arrived."""
WINDOW = 128
"""Requests at once, of an engine that does not say."""
MOST = 512
"""Requests at once, over all ranks."""
CLASS = 128
"""Prompt lengths of one class are computed by one kernel, as a rule."""
GAIN_SECONDS = 0.02
"""A step that gets quicker by less was warm."""
GAIN = 1.5

_FLOOR, _SPAN = 1000, 30000
"""Ids that are words of a vocabulary: special ones, media placeholders too, stand at either end."""
_FINE = (*(2**power for power in range(9)), *range(512, 2049, 256), *range(2560, 4097, 512))


@dataclass(frozen=True, slots=True)
class Shape:
    """What of an engine decides over its requests; unknown stays None."""

    step_tokens: int | None
    """Most prompt tokens that one step computes."""
    context: int | None
    """Prompt and output together."""
    vocab: int | None
    window: int | None = None
    """Most requests that one rank runs at once."""
    captured: tuple[int, ...] = ()
    """Batch sizes that the engine has graphs of."""
    ranks: tuple[int, ...] = ()
    """Those that requests can be pinned to; empty when there is only one."""
    reserve: int = 0
    """Positions of the context that the engine keeps to itself."""


@dataclass(frozen=True, slots=True)
class Shot:
    """One request of a step, before it has a number."""

    prompt_tokens: int
    output_tokens: int
    rank: int | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """Requests that are sent together."""

    name: str
    shots: tuple[Shot, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """`opening`, then `grid`, then `grid` again, then `rest` if the second time was quicker."""

    about: str = ""
    """For a log line: how much it is, and why; empty when nothing was wanted."""
    vocab: int | None = None
    opening: tuple[Step, ...] = ()
    """What makes the engine ready to be measured."""
    grid: tuple[Step, ...] = ()
    rest: tuple[Step, ...] = ()

    @property
    def steps(self) -> int:
        """Most of them that are taken."""
        return len(self.opening) + 2 * len(self.grid) + len(self.rest)


@dataclass(frozen=True, slots=True)
class Request:
    """One request as it is sent: greedy, and on to its last token whatever that is."""

    request_id: str
    prompt: Sequence[int]
    output_tokens: int
    rank: int | None


ONE = (Step("one request", (Shot(1, 1),)),)
NOTHING = Plan()


def make(level: str, shape: Shape, pointless: str | None = None, *, opened: bool = False) -> Plan:
    """The plan of a level.

    :param pointless: why this engine gains nothing by more than one request, if it does not;
        only `auto` minds.
    :param opened: the engine has answered a request already.
    """
    if level == "off":
        return NOTHING
    opening = () if opened else ONE
    if level == "auto":
        if pointless is not None:
            return Plan(f"one request, {pointless}", shape.vocab, opening)
        level = "full"
    limit = _longest(shape)
    if limit < 1:
        return Plan("one request, the engine does not say what it takes", shape.vocab, opening)
    lengths = _grid(limit)
    grid = (*_decode(shape, powers_of_two()), *_prompts(shape, lengths))
    rest: tuple[Step, ...] = ()
    if level == "full":
        more = {*range(CLASS, limit + 1, CLASS), *shape.captured}
        more |= {length + 1 for length in lengths if length >= 2 * PROMPT}
        finer = sorted(length for length in more - lengths if 1 <= length <= limit)
        rest = (*_decode(shape, shape.captured), *_prompts(shape, finer))
    return Plan(level, shape.vocab, opening, grid, rest)


def request(number: int, shot: Shot, vocab: int | None) -> Request:
    """A shot under its number. Neighbours never begin alike, so none finds another's in a cache."""
    size = vocab or 1
    low = _FLOOR if size > 2 * _FLOOR else size // 2
    high = max(min(size, low + _SPAN), low + 1)
    ids = random.Random(number).choices(range(low, high), k=shot.prompt_tokens)
    ids[0] = low + number % (high - low)
    return Request(f"smg-warmup-{number}", ids, shot.output_tokens, shot.rank)


def quicker(before: Iterable[float | None], after: Iterable[float | None]) -> bool:
    """Whether any step took clearly less time the second time; None is a step that failed."""
    return any(
        first is not None
        and second is not None
        and first > GAIN * second
        and first - second > GAIN_SECONDS
        for first, second in zip(before, after, strict=False)
    )


def powers_of_two() -> tuple[int, ...]:
    return tuple(2**power for power in range(MOST.bit_length()))


def _longest(shape: Shape) -> int:
    if not shape.step_tokens or not shape.context or not shape.vocab:
        return 0
    return min(shape.step_tokens, shape.context - 1 - shape.reserve)


def _grid(limit: int) -> set[int]:
    coarse = (2**power for power in range(13, limit.bit_length()))
    return {length for length in (*_FINE, *coarse) if length <= limit} | {limit}


def _prompts(shape: Shape, lengths: Iterable[int]) -> list[Step]:
    return [
        Step(f"prompt of {length}", _everywhere(shape, [Shot(length, 1)]))
        for length in sorted(lengths)
    ]


def _decode(shape: Shape, wanted: Iterable[int]) -> list[Step]:
    """One step: the requests end one after another, so that their batch has each size once.

    A stair with a step for each size there is would cost the square of the window.
    """
    assert shape.step_tokens is not None
    assert shape.context is not None
    room = shape.context - shape.reserve - PROMPT - 1
    share = MOST // max(1, len(shape.ranks))
    most = min(shape.window or WINDOW, shape.step_tokens // PROMPT, max(share, 1))
    sizes = {size for size in wanted if 1 <= size <= most}
    if not sizes or room < 1:
        return []
    sizes.add(most)
    shots = [
        Shot(PROMPT, min(room, 1 + SETTLE + sum(size > place for size in sizes)))
        for place in range(most)
    ]
    return [Step(f"decode of {most}", _everywhere(shape, shots))]


def _everywhere(shape: Shape, shots: Iterable[Shot]) -> tuple[Shot, ...]:
    return tuple(
        Shot(shot.prompt_tokens, shot.output_tokens, rank)
        for shot in shots
        for rank in shape.ranks or (None,)
    )
