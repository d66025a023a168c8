"""What a request must satisfy before any engine work, whoever serves it.

`path` turns a core name into the name the caller used (`max_tokens` is `max_new_tokens` for some),
so that the error names the field as it stands in the request.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.types import GenerateSpec, LogprobSpec, ModelFacts, Sampling

Path = Callable[[str], str]

MAX_CHOICES = 128
MAX_STOP_IDS = 4096
MAX_STOPS = 256
MAX_STOP_LENGTH = 16 * 1024
"""Stop strings, and their characters in all. Engines look for each of them after every token:
100,000 strings stop all of vLLM's streams for half a minute. SGLang has its scheduler decode as
many tokens as the longest has at every step.
"""
MAX_SEED = 2**64 - 1


def validate(spec: GenerateSpec, facts: ModelFacts, path: Path, *, min_output: int = 1) -> None:
    """Everything but the prompt itself. :raises InvalidArgument: naming the field."""
    check = _remembered if spec.sampling.is_small else _sampling
    check(spec.sampling, facts.vocab_size, path, min_output)
    _logprobs(spec.logprobs, facts, path)
    if spec.rank is not None and spec.rank < 0:
        raise InvalidArgument(path("rank"), f"must not be negative, got {spec.rank}")
    limit = facts.max_context_length
    _count(path, "truncate_prompt", spec.truncate_prompt, low=-1, high=limit or math.inf)
    if spec.truncate_prompt == 0:
        raise InvalidArgument(path("truncate_prompt"), "must not be 0: no prompt would be left")


def truncated(
    prompt: Sequence[int], keep: int | None, facts: ModelFacts, *, min_output: int = 1
) -> Sequence[int]:
    """The prompt's last `keep` ids; -1 keeps what leaves room for `min_output`."""
    if keep == -1 and facts.max_context_length is not None:
        keep = facts.max_context_length - min_output
    if keep is None or keep < 0 or len(prompt) <= keep:
        return prompt
    return prompt[len(prompt) - keep :]


def checked_prompt(
    prompt: Sequence[int], facts: ModelFacts, where: str, *, min_output: int = 1
) -> list[int]:
    """The prompt's ids, checked against context and vocabulary; `where` is the field's path.

    Its length is looked at first: a prompt of ten million ids costs nothing before it is refused.

    :raises InvalidArgument: naming the field.
    """
    if not prompt:
        raise InvalidArgument(where, "must not be empty")
    limit = facts.max_context_length
    if limit is not None and len(prompt) + min_output > limit:
        raise InvalidArgument(
            where,
            f"the prompt has {len(prompt)} tokens and the model's context length is {limit}"
            + ("; at least one token of it must be left for the output" if min_output else ""),
        )
    ids = list(prompt)
    if facts.vocab_size is not None and max(ids) >= facts.vocab_size:
        at = next(i for i, token in enumerate(ids) if token >= facts.vocab_size)
        raise InvalidArgument(
            f"{where}[{at}]",
            f"token id {ids[at]} is outside the vocabulary of {facts.vocab_size}",
        )
    return ids


def _sampling(sampling: Sampling, vocab_size: int | None, path: Path, min_output: int) -> None:
    _number(path, "temperature", sampling.temperature, low=0.0)
    _number(path, "top_p", sampling.top_p, low=0.0, high=1.0)
    _number(path, "min_p", sampling.min_p, low=0.0, high=1.0)
    _number(path, "frequency_penalty", sampling.frequency_penalty)
    _number(path, "presence_penalty", sampling.presence_penalty)
    _number(path, "repetition_penalty", sampling.repetition_penalty, low=0.0)
    _count(path, "top_k", sampling.top_k, low=1)
    _count(path, "max_tokens", sampling.max_tokens, low=min_output)
    _count(path, "min_tokens", sampling.min_tokens, low=0)
    _count(path, "n", sampling.n, low=1, high=MAX_CHOICES)
    _count(path, "seed", sampling.seed, low=-(2**63), high=MAX_SEED)
    top = sampling.max_tokens
    if top is not None and sampling.min_tokens is not None and sampling.min_tokens > top:
        raise InvalidArgument(
            path("min_tokens"),
            f"must not exceed {path('max_tokens')} ({top}), got {sampling.min_tokens}",
        )
    if len(sampling.stop_token_ids) > MAX_STOP_IDS:
        raise InvalidArgument(
            path("stop_token_ids"),
            f"must have at most {MAX_STOP_IDS} ids, got {len(sampling.stop_token_ids)}",
        )
    for token in sampling.stop_token_ids:
        _token(path, "stop_token_ids", token, vocab_size)
    for token, bias in sampling.logit_bias.items():
        _token(path, "logit_bias", token, vocab_size)
        if not math.isfinite(bias):
            raise InvalidArgument(
                f"{path('logit_bias')}[{token}]", f"must be a finite number, got {bias}"
            )
    if len(sampling.stop) > MAX_STOPS:
        raise InvalidArgument(
            path("stop"), f"must have at most {MAX_STOPS} strings, got {len(sampling.stop)}"
        )
    length = sum(map(len, sampling.stop))
    if length > MAX_STOP_LENGTH:
        raise InvalidArgument(
            path("stop"), f"must have at most {MAX_STOP_LENGTH} characters in all, got {length}"
        )
    if "" in sampling.stop:
        raise InvalidArgument(path("stop"), "must not contain an empty string")


_remembered = lru_cache(256)(_sampling)


def _logprobs(wanted: LogprobSpec, facts: ModelFacts, path: Path) -> None:
    _count(path, "logprobs", wanted.output, low=-1)
    _count(path, "prompt_logprobs", wanted.prompt, low=-1)
    if facts.vocab_size is not None and len(wanted.token_ids) > facts.vocab_size:
        raise InvalidArgument(
            path("token_ids_logprob"),
            f"must have at most as many ids as the vocabulary ({facts.vocab_size}), "
            f"got {len(wanted.token_ids)}",
        )
    for token in wanted.token_ids:
        _token(path, "token_ids_logprob", token, facts.vocab_size)


def _number(
    path: Path, name: str, value: float | None, low: float = -math.inf, high: float = math.inf
) -> None:
    if value is None:
        return
    if not math.isfinite(value):
        raise InvalidArgument(path(name), f"must be a finite number, got {value}")
    if not low <= value <= high:
        raise InvalidArgument(path(name), f"must be {_range(low, high)}, got {value:g}")


def _count(path: Path, name: str, value: int | None, low: int, high: float = math.inf) -> None:
    if value is not None and not low <= value <= high:
        raise InvalidArgument(path(name), f"must be {_range(low, high)}, got {value}")


def _range(low: float, high: float) -> str:
    return f"at least {low:g}" if high == math.inf else f"between {low:g} and {high:g}"


def _token(path: Path, name: str, token: int, vocab_size: int | None) -> None:
    if token < 0 or (vocab_size is not None and token >= vocab_size):
        size = "" if vocab_size is None else f" of {vocab_size}"
        raise InvalidArgument(path(name), f"token id {token} is outside the vocabulary{size}")
