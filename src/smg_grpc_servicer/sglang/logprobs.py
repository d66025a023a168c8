"""SGLang's log-probability columns as core rows, one request of a batch at a time.

Columns hold one entry per request: the rows that are new since its last output. Top columns are
read only when the request asked for some. A row that does not match what was asked for is an
engine's fault and raises `Malformed`; it concerns that request only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_servicer.core.errors import Internal
from smg_grpc_servicer.core.types import LogprobRows, LogprobSpec, PromptLogprobs


class Malformed(Internal):
    """The engine's log-probabilities of one request do not fit together."""


def output_rows(batch: Any, at: int, count: int, wanted: LogprobSpec) -> LogprobRows | None:
    """Rows in step with the `count` new tokens; None when there are none at all.

    A prompt that is only scored (no output) has rows of chosen ids without a token.
    """
    column = batch.output_token_logprobs_val
    if not column:
        if count:
            raise Malformed("the engine sent tokens without their logprobs")
        return None
    values = column[at] or []
    if len(values) < count:
        raise Malformed(f"the engine sent {len(values)} logprobs for {count} tokens")
    rows = LogprobRows(values if len(values) == count else values[:count])
    if wanted.output:
        ids, found = batch.output_top_logprobs_idx[at], batch.output_top_logprobs_val[at]
        if len(ids) < count or len(found) < count:
            raise Malformed(f"the engine sent {len(ids)} rows of top logprobs for {count} tokens")
        if len(ids) != count or len(found) != count or None in ids:
            ids, found = _plain(ids[:count]), _plain(found[:count])
        rows.top_ids, rows.top_values = ids, found
    if wanted.token_ids:
        rows.chosen = _chosen(batch, at, len(values) if count else None, wanted.token_ids)
    return rows if count or rows.chosen else None


def _chosen(batch: Any, at: int, count: int | None, token_ids: Sequence[int]) -> list[list[float]]:
    """Rows of the ids the request asked for, checked against its ids.

    :param count: how many there must be; None when no token came, and a scored prompt has one.
    """
    column, names = batch.output_token_ids_logprobs_val, batch.output_token_ids_logprobs_idx
    if not column or not names or len(column) != len(batch.rids) or len(names) != len(batch.rids):
        raise Malformed("the engine sent no logprobs of the chosen token ids")
    rows, ids = column[at] or [], names[at] or []
    if count is None:
        count = min(len(rows), 1)
    if len(rows) != count or len(ids) != count:
        raise Malformed(
            f"the engine sent {len(rows)} rows of chosen logprobs ({len(ids)} of ids) "
            f"for {count} positions"
        )
    chosen = []
    for row, row_ids in zip(rows, ids, strict=True):
        if row is None or row_ids is None or list(row_ids) != list(token_ids):
            raise Malformed("the engine's chosen logprobs are not those of the ids asked for")
        if len(row) != len(token_ids):
            raise Malformed(
                f"the engine sent {len(row)} chosen logprobs for {len(token_ids)} token ids"
            )
        chosen.append([float(value) for value in row])
    return chosen


def prompt_rows(batch: Any, at: int, wanted: LogprobSpec) -> PromptLogprobs | None:
    """They come once, with the first output after the prompt was computed."""
    column = batch.input_token_logprobs_val
    if not column or not column[at]:
        return None
    values, ids = column[at], batch.input_token_logprobs_idx[at]
    top_ids: list[list[int]] = []
    top_values: list[list[float]] = []
    if wanted.prompt:
        top_ids = _padded(batch.input_top_logprobs_idx[at], len(ids))
        top_values = _padded(batch.input_top_logprobs_val[at], len(ids))
    return PromptLogprobs(ids, values, top_ids, top_values)


def _plain(rows: Sequence[Any]) -> list[Any]:
    return [row or [] for row in rows]


def _padded(rows: Sequence[Any] | None, count: int) -> list[Any]:
    """One entry per position: the first has none, and SGLang says so in more than one way."""
    plain = _plain(rows or [])
    return [[]] * (count - len(plain)) + plain
