"""What goes into the generation thread (`Job`), what comes out (`Event`), and a running `Row`.

Every accepted job gets exactly one last event: one with `finish` or one with `error`.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from smg_grpc_servicer.core.types import Finish, LogprobRows, Sampling

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy: dividing logits by less only adds overflow."""


@dataclass(frozen=True, slots=True)
class Job:
    """One choice to generate. Ids must be within the vocabulary; the caller has checked."""

    uid: str
    prompt: Sequence[int]
    max_tokens: int
    sampling: Sampling = field(default_factory=Sampling)
    stop_ids: frozenset[int] = frozenset()
    """End-of-text ids (unless ignored) and the request's own; the match stays in the output."""
    logprobs: int | None = None
    """None = none, 0 = the token's own, k = the k best too, -1 = the whole vocabulary."""


@dataclass(slots=True)
class Event:
    """What one step did for one job; not frozen only because one is made per row and step."""

    uid: str
    token_ids: list[int] = field(default_factory=list)
    logprobs: LogprobRows | None = None
    finish: Finish | None = None
    cached_tokens: int | None = None
    """Prompt tokens that came from the prefix cache; told once, with the first token."""
    error: Exception | None = None

    @property
    def last(self) -> bool:
        """No event of this job follows."""
        return self.finish is not None or self.error is not None


@dataclass(slots=True, eq=False)
class Row:
    """A job in the runtime. `tokens` is the prompt and every output token read so far."""

    job: Job
    arrival: int
    """Order of submission, for fairness between lanes."""
    tokens: list[int]
    prompt_length: int
    key: tuple[int, int]
    """Random key of this row; a step uses it with the step's position added."""
    caches: list[Any] | None = None
    """Per-layer caches while the prompt is processed alone; the batch owns them afterwards."""
    prefilled: int = 0
    cached: int | None = None
    """Prefix-cache hit in tokens; None until looked up, and again once it was reported."""
    launched: int = 0
    """Steps launched, so output tokens that exist or are being computed."""
    alone: bool = False
    """Its prefill group failed: it is tried once more by itself."""
    done: bool = False
    failed: bool = False
    """Ended by an error or a cancel; its cache is not worth keeping."""

    @property
    def uid(self) -> str:
        return self.job.uid

    @property
    def fed(self) -> list[int]:
        """The tokens whose keys and values the cache holds."""
        return self.tokens[: self.prompt_length - 1 + self.launched]

    @property
    def exhausted(self) -> bool:
        """All its steps are launched; it only waits to be read."""
        return self.launched >= self.job.max_tokens


def make_row(job: Job, arrival: int) -> Row:
    tokens = list(job.prompt)
    return Row(job, arrival, tokens, len(tokens), random_key(job.sampling.seed))


def random_key(seed: int | None) -> tuple[int, int]:
    """Two 32-bit words from a seed of any size; from the system's entropy when there is none.

    Hashed, so that the streams of neighbouring seeds do not overlap when positions are added.
    """
    raw = secrets.token_bytes(8) if seed is None else str(seed).encode()
    digest = hashlib.blake2b(raw, digest_size=8).digest()
    return int.from_bytes(digest[:4], "little"), int.from_bytes(digest[4:], "little")


def describe(cause: BaseException) -> str:
    """Type and message; never empty."""
    text = str(cause).strip()
    return f"{type(cause).__name__}: {text}" if text else type(cause).__name__
