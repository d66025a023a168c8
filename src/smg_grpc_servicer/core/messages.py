"""Keeping every message under what the gateway can receive: 4 MiB, a limit it never raises."""

from __future__ import annotations

from collections.abc import Iterator

from smg_grpc_servicer.core.types import Delta, PromptLogprobs

MAX_MESSAGE_BYTES = 4 * 1024 * 1024 - 16 * 1024
"""What one message may take, with room for headers and counters."""

CHUNK_BYTES = 1024 * 1024
"""A chunk that would be larger goes out as several; large messages hold up their neighbours."""

_ID_BYTES = 5
_PAIR_BYTES = 9
_ROW_BYTES = 25
"""Upper bounds of a varint id; an id with its float; a row with its own value, tags and lengths."""


def fits(delta: Delta, max_tokens: int | None = None, *, max_bytes: int = CHUNK_BYTES) -> bool:
    """Whether a delta is one piece, as far as that can be told at once: rows have to be counted."""
    count = len(delta.token_ids)
    return (
        count * _ID_BYTES <= max_bytes
        and (max_tokens is None or count <= max_tokens)
        and delta.logprobs is None
        and delta.prompt_logprobs is None
    )


def pieces(
    delta: Delta, *, max_bytes: int = CHUNK_BYTES, max_tokens: int | None = None
) -> Iterator[Delta]:
    """The delta itself when it fits, else several in order; the last one carries the end.

    No piece has more than `max_tokens` ids. A single token's row is never split. A piece is good
    until the next one is asked for.
    """
    if fits(delta, max_tokens, max_bytes=max_bytes):
        return iter((delta,))
    if delta.logprobs is not None or delta.prompt_logprobs is not None:
        return _cut_rows(delta, max_bytes, max_tokens)
    most = max(1, max_bytes // _ID_BYTES)
    return _cut(delta, most if max_tokens is None else min(most, max_tokens))


def _cut(delta: Delta, most: int) -> Iterator[Delta]:
    """Ids alone: the delta itself, with `most` of its ids at a time."""
    ids, finish = delta.token_ids, delta.finish
    last = (len(ids) - 1) // most * most
    delta.finish = None
    for start in range(0, last, most):
        delta.token_ids = ids[start : start + most]
        yield delta
        # The first piece has told the counts.
        delta.prompt_tokens = delta.cached_tokens = delta.reasoning_tokens = None
        delta.weight_version = None
    delta.token_ids, delta.finish = ids[last:], finish
    yield delta


def _cut_rows(delta: Delta, max_bytes: int, max_tokens: int | None) -> Iterator[Delta]:
    """With rows, which have to be counted."""
    count = len(delta.token_ids)
    yield from _prompt_pieces(delta, max_bytes)
    start = 0
    while (end := _fitting(delta, start, max_bytes, max_tokens)) < count:
        yield _slice(delta, start, end)
        start = end
    if start:
        delta.logprobs = None if delta.logprobs is None else delta.logprobs.slice(start, count)
        delta.token_ids = delta.token_ids[start:]
    yield delta


def _fitting(delta: Delta, start: int, max_bytes: int, max_tokens: int | None) -> int:
    """Where the piece that begins at `start` ends."""
    count = len(delta.token_ids)
    last = count if max_tokens is None else min(count, start + max_tokens)
    rows = delta.logprobs
    if rows is None:
        return min(last, start + max(1, max_bytes // _ID_BYTES))
    size = 0
    for at in range(start, last):
        pairs = len(rows.top_ids[at]) if rows.top_ids else 0
        if rows.chosen:
            pairs += len(rows.chosen[at]) + 2  # the second row's own tags and lengths
        size += _ROW_BYTES + _PAIR_BYTES * pairs
        if size > max_bytes and at > start:
            return at
    return last


def _slice(delta: Delta, start: int, end: int) -> Delta:
    return Delta(
        index=delta.index,
        token_ids=delta.token_ids[start:end],
        logprobs=None if delta.logprobs is None else delta.logprobs.slice(start, end),
        prompt_tokens=delta.prompt_tokens,
        cached_tokens=delta.cached_tokens,
        reasoning_tokens=delta.reasoning_tokens,
        weight_version=delta.weight_version,
    )


def _prompt_pieces(delta: Delta, max_bytes: int) -> Iterator[Delta]:
    """Prompt rows that do not fit in one message go ahead of the tokens, taken out of the delta."""
    rows = delta.prompt_logprobs
    if rows is None:
        return
    parts, start, size = [], 0, 0
    for at in range(len(rows.token_ids)):
        size += _ROW_BYTES + _PAIR_BYTES * (len(rows.top_ids[at]) if rows.top_ids else 0)
        if size > max_bytes and at > start:
            parts.append((start, at))
            start, size = at, 0
    if not parts:
        return
    delta.prompt_logprobs = None
    for begin, end in [*parts, (start, len(rows.token_ids))]:
        part = PromptLogprobs(
            rows.token_ids[begin:end],
            rows.values[begin:end],
            rows.top_ids[begin:end],
            rows.top_values[begin:end],
        )
        yield Delta(delta.index, prompt_tokens=delta.prompt_tokens, prompt_logprobs=part)
