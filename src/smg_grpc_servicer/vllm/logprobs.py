"""vLLM's log-probabilities as core rows: one entry per token, exactly the k best, best first.

vLLM lists the sampled token first and then ranks 1 to k; a dictionary drops what is double, a
`FlatLogprobs` (asked for: it makes no object per entry) keeps it. A value that is no finite
number, or missing, is -9999.0, as vLLM's own HTTP server writes it: JSON has no infinity, and a
row must stay in step with its token.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_servicer.core.types import LogprobRows, PromptLogprobs

FLOOR = -9999.0

Row = tuple[float, list[int], list[float]]


def output_rows(logprobs: Any, token_ids: Sequence[int], count: int) -> LogprobRows:
    """Rows in step with `token_ids`; `count` as the request put it (-1 = all)."""
    rows = LogprobRows()
    values, top_ids, top_values = rows.values, rows.top_ids, rows.top_values
    read = _flat if hasattr(logprobs, "start_indices") else _any
    have = len(logprobs)
    for at, token in enumerate(token_ids):
        value, ids, row = read(logprobs, at, token, count) if at < have else (FLOOR, [], [])
        values.append(value)
        top_ids.append(ids)
        top_values.append(row)
    return rows


def prompt_rows(logprobs: Any, token_ids: Sequence[int], count: int) -> PromptLogprobs:
    """One entry per prompt token; the first has no value."""
    values: list[float | None] = []
    top_ids: list[list[int]] = []
    top_values: list[list[float]] = []
    flat = hasattr(logprobs, "start_indices")
    read = _flat if flat else _any
    have = len(logprobs)
    for at, token in enumerate(token_ids):
        if at >= have or not _present(logprobs, at, flat):
            values.append(None)
            top_ids.append([])
            top_values.append([])
            continue
        value, ids, row = read(logprobs, at, token, count)
        values.append(value)
        top_ids.append(ids)
        top_values.append(row)
    return PromptLogprobs(list(token_ids), values, top_ids, top_values)


def _present(logprobs: Any, at: int, flat: bool) -> bool:
    if flat:
        return bool(logprobs.start_indices[at] < logprobs.end_indices[at])
    return bool(logprobs[at])


def _any(logprobs: Any, at: int, token: int, count: int) -> Row:
    return _entry(logprobs[at], token, count)


def _flat(logprobs: Any, at: int, token: int, count: int) -> Row:
    start, end = logprobs.start_indices[at], logprobs.end_indices[at]
    size = end - start
    if size and logprobs.token_ids[start] == token and size == count + 1:
        row = logprobs.logprobs[start + 1 : end]
        return _sane(logprobs.logprobs[start]), logprobs.token_ids[start + 1 : end], _row(row)
    ids, found = logprobs.token_ids[start:end], logprobs.logprobs[start:end]
    if size > 1 and ids[0] in ids[1:]:
        # Nothing was dropped: the first entry is the token itself, the rest the k best.
        best = ids[1:], found[1:]
    else:
        best = _ranked(list(zip(ids, found, logprobs.ranks[start:end], strict=True)), token, count)
    own = next((v for i, v in zip(ids, found, strict=True) if i == token), FLOOR)
    return _sane(own), best[0], _row(best[1])


def _entry(position: Any, token: int, count: int) -> Row:
    """One position's dictionary."""
    if not position:
        return FLOOR, [], []
    own = position.get(token)
    value = FLOOR if own is None else _sane(own.logprob)
    if count == 0:
        return value, [], []
    ids, row = _ranked([(i, e.logprob, e.rank) for i, e in position.items()], token, count)
    return value, ids, _row(row)


def _ranked(
    entries: list[tuple[int, float, int | None]], token: int, count: int
) -> tuple[list[int], list[float]]:
    """The `count` best of unordered entries, by rank; an entry without a rank goes by its value."""
    if count == 0 or not entries:
        return [], []
    wanted = len(entries) if count < 0 else count
    if len(entries) > wanted:
        # One more than asked for: the sampled token is not among the best.
        entries = [entry for entry in entries if entry[0] != token] or entries
    # Values fall as ranks rise, and a rank may be -1 where nobody counted.
    entries.sort(key=lambda entry: (-_sane(entry[1]), entry[2] or 0))
    chosen = entries[:wanted]
    return [entry[0] for entry in chosen], [entry[1] for entry in chosen]


def _row(values: list[float]) -> list[float]:
    # Best first: when both ends are numbers in range all are. A NaN sorts first.
    if not values or (FLOOR <= values[0] <= 0.1 and values[-1] >= FLOOR):
        return values
    return [_sane(value) for value in values]


def _sane(value: float) -> float:
    # In this order a NaN gives the floor too.
    return max(FLOOR, value)
