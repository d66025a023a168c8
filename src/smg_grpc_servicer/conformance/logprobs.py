"""Log-probabilities: there when asked for, once, in step with their ids, best first, true."""

from __future__ import annotations

import math
from typing import Any

import grpc

from smg_grpc_servicer.conformance.registry import NotApplicable, check, expect
from smg_grpc_servicer.conformance.target import Target, answered, kept, output, served, status
from smg_grpc_servicer.testing.history import MAX_RECEIVE_BYTES, History

TOKENS = 10
TOLERANCE = 0.05
"""Two runs of one request on one GPU may differ by rounding."""

BIG_BYTES = int(1.2 * MAX_RECEIVE_BYTES)
BYTES_PER_ENTRY = 6
MOST_TOKENS = 900


def _rows(history: History) -> tuple[list[float], list[Any]]:
    """All values and all top rows of the first choice, streamed or whole."""
    parts = history.chunks if history.stream else history.completes
    values = [value for part in parts for value in part.output_logprobs.token_logprobs]
    rows = [row for part in parts for row in part.output_logprobs.top_logprobs]
    return values, rows


@check("logprobs-off", "nobody who did not ask gets logprobs")
async def logprobs_off(target: Target) -> None:
    for stream in (True, False):
        values, rows = _rows(await target.generate(max_tokens=3, stream=stream))
        expect(not values and not rows, f"{len(values)} values, stream={stream}")


@check("logprobs-zero", "logprobs 0 is none, or each token's own, in step")
async def logprobs_zero(target: Target) -> str:
    history = served(await target.ask(target.request(max_tokens=TOKENS, logprobs=0)))
    values, _ = _rows(history)
    expect(len(values) in (0, TOKENS), f"{len(values)} values for {TOKENS} ids")
    return "each token's own" if values else "none"


@check("logprobs-stream", "streamed logprobs travel in the chunks, one row an id, and only there")
async def logprobs_stream(target: Target) -> None:
    for top in (1, 5):
        kept(await target.ask(target.request(max_tokens=TOKENS, logprobs=top)), logprobs=top)


@check("logprobs-unary", "a whole answer carries the logprobs of all its ids")
async def logprobs_unary(target: Target) -> None:
    for top in (1, 5):
        request = target.request(max_tokens=TOKENS, logprobs=top, stream=False)
        kept(await target.ask(request), logprobs=top)


@check("logprobs-agree", "streamed and whole logprobs of one greedy request agree")
async def logprobs_agree(target: Target) -> None:
    streamed = await target.generate(max_tokens=TOKENS, logprobs=2)
    whole = await target.generate(max_tokens=TOKENS, logprobs=2, stream=False)
    expect(output(streamed) == output(whole), "other ids")
    pairs = zip(_rows(streamed)[0], _rows(whole)[0], strict=False)
    expect(_rows(whole)[0], "no logprobs")
    worst = max(abs(a - b) for a, b in pairs)
    expect(worst <= TOLERANCE, f"they differ by {worst:.3g}")


@check("logprobs-sorted", "a row of top logprobs is sorted best first, without repeats")
async def logprobs_sorted(target: Target) -> None:
    history = served(await target.ask(target.request(max_tokens=TOKENS, logprobs=5)))
    rows = _rows(history)[1]
    expect(rows, "no rows")
    for row in rows:
        values = list(row.values)
        expect(values == sorted(values, reverse=True), f"values {values}")
        expect(len(set(row.token_ids)) == len(row.token_ids), f"ids {list(row.token_ids)}")


@check("logprobs-finite", "logprobs are finite and not above zero, and no row sums past one")
async def logprobs_finite(target: Target) -> None:
    history = served(await target.ask(target.request(max_tokens=TOKENS, logprobs=5)))
    values, rows = _rows(history)
    for value in [*values, *(value for row in rows for value in row.values)]:
        expect(math.isfinite(value) and value <= 1e-3, f"a logprob of {value}")
    for row in rows:
        total = sum(math.exp(value) for value in row.values)
        expect(total <= 1.02, f"probabilities of one row sum to {total:.4f}")


@check("logprobs-greedy", "the greedy token is the best of its row, with the same value")
async def logprobs_greedy(target: Target) -> None:
    history = served(await target.ask(target.request(max_tokens=TOKENS, logprobs=5)))
    values, rows = _rows(history)
    expect(rows, "no rows")
    for token, value, row in zip(output(history), values, rows, strict=False):
        gap = abs(row.values[0] - value)
        expect(gap <= TOLERANCE, f"id {token} has {value:.4f}, the best {row.values[0]:.4f}")
        expect(token in row.token_ids, f"id {token} is not in its own row")


def _width(target: Target) -> int:
    """The widest rows to ask for: the whole vocabulary, where one number says so."""
    return min(target.vocab_size, 4000) if target.dialect.logprobs_in_request else -1


async def _big(target: Target, *, stream: bool) -> History:
    """An answer past the gateway's limit, or as near to it as the server lets a client come."""
    per_token = BYTES_PER_ENTRY * (target.vocab_size if _width(target) < 0 else _width(target))
    most = target.tokens_for(target.timeout / 3, MOST_TOKENS)
    tokens = min(most, math.ceil(BIG_BYTES / per_token))
    refused = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.UNIMPLEMENTED)
    request = target.request(max_tokens=tokens, logprobs=_width(target), stream=stream)
    history = await target.ask(request)
    if history.code in refused:
        tokens = target.tokens_for(3.0, 400)
        request = target.request(max_tokens=tokens, logprobs=20, stream=stream)
        history = await target.ask(request)
    if history.code in refused:
        raise NotApplicable(f"no large answer to be had: {status(history)}")
    return history


def _size(history: History) -> tuple[int, str]:
    sizes = [message.ByteSize() for message in history.messages] or [0]
    total = f"{sum(sizes) / 2**20:.1f} MiB in {len(sizes)} messages"
    return max(sizes), total


@check("message-size-stream", "no streamed message passes 4 MiB, the gateway's limit")
async def message_size_stream(target: Target) -> str:
    history = answered(await _big(target, stream=True))
    largest, total = _size(history)
    expect(largest < MAX_RECEIVE_BYTES, f"a message of {largest} bytes")
    return total


@check("message-size-unary", "a whole answer stays under 4 MiB or ends RESOURCE_EXHAUSTED")
async def message_size_unary(target: Target) -> str:
    history = await _big(target, stream=False)
    if history.code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        expect(history.details, "RESOURCE_EXHAUSTED without a word")
        return "RESOURCE_EXHAUSTED"
    answered(history)
    largest, total = _size(history)
    expect(largest < MAX_RECEIVE_BYTES, f"a message of {largest} bytes")
    return total
