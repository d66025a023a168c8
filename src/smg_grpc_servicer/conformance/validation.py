"""Invalid input, a row each: INVALID_ARGUMENT that names the field, and the next request is fine.

Rows that took down or corrupted servers in the wild run after everything gentle.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import grpc

from smg_grpc_servicer.conformance.registry import (
    Check,
    Failed,
    NotApplicable,
    Order,
    add,
    check,
    expect,
)
from smg_grpc_servicer.conformance.target import Target, answered, output, status
from smg_grpc_servicer.testing.dialects import Unsayable
from smg_grpc_servicer.testing.history import History

Make = Callable[[Target], dict[str, Any]]

NAN, INF = math.nan, math.inf


@dataclass(frozen=True, slots=True)
class Row:
    """One kind of invalid request."""

    name: str
    about: str
    make: Make
    """Options of the request; `edit` among them changes the message itself."""
    fields: tuple[str, ...]
    """Names by which the error may call the field."""
    rough: bool = False


def _fixed(**options: Any) -> Make:
    return lambda target: options


def _context(target: Target) -> int:
    if not target.facts.context:
        raise NotApplicable("the context length is unknown")
    return target.facts.context


def _rank(request: Any) -> None:
    if "data_parallel_rank" not in request.DESCRIPTOR.fields_by_name:
        raise Unsayable("data_parallel_rank")
    request.data_parallel_rank = -1


_PROMPT = ("input_ids", "prompt")
_TOP = ("logprobs", "top_logprobs_num")

ROWS = (
    Row(
        "no-input",
        "neither token ids nor text",
        _fixed(edit=lambda request: request.ClearField("tokenized")),
        ("input", "tokenized"),
    ),
    Row("prompt-empty", "an empty prompt", _fixed(prompt=[]), _PROMPT, rough=True),
    Row(
        "prompt-id",
        "a prompt id one past the vocabulary",
        lambda target: {"prompt": [*target.prompt, target.vocab_size]},
        _PROMPT,
        rough=True,
    ),
    Row(
        "prompt-id-huge",
        "a prompt id of 2**32 - 1",
        _fixed(prompt=[5, 2**32 - 1]),
        _PROMPT,
        rough=True,
    ),
    Row(
        "prompt-full",
        "a prompt as long as the context",
        lambda target: {"prompt": [target.prompt[0]] * _context(target)},
        _PROMPT,
        rough=True,
    ),
    Row(
        "prompt-too-long",
        "a prompt longer than the context",
        lambda target: {"prompt": [target.prompt[0]] * (_context(target) + 50)},
        _PROMPT,
        rough=True,
    ),
    Row("max-tokens-0", "max_tokens 0", _fixed(max_tokens=0), ("max_tokens", "max_new_tokens")),
    Row("temperature-negative", "temperature -1", _fixed(temperature=-1.0), ("temperature",)),
    Row("temperature-nan", "temperature NaN", _fixed(temperature=NAN), ("temperature",)),
    Row(
        "temperature-infinite", "an infinite temperature", _fixed(temperature=INF), ("temperature",)
    ),
    Row("top-p-above-1", "top_p 1.5", _fixed(top_p=1.5), ("top_p",)),
    Row("top-p-negative", "top_p -0.1", _fixed(top_p=-0.1), ("top_p",)),
    Row("min-p-above-1", "min_p 2", _fixed(min_p=2.0), ("min_p",), rough=True),
    Row("min-p-negative", "min_p -0.5", _fixed(min_p=-0.5), ("min_p",), rough=True),
    Row("top-k-negative", "top_k -2", _fixed(top_k=-2), ("top_k",)),
    Row(
        "frequency-nan",
        "frequency_penalty NaN",
        _fixed(frequency_penalty=NAN),
        ("frequency_penalty",),
    ),
    Row(
        "presence-infinite",
        "an infinite presence_penalty",
        _fixed(presence_penalty=-INF),
        ("presence_penalty",),
    ),
    Row(
        "repetition-negative",
        "repetition_penalty -1",
        _fixed(repetition_penalty=-1.0),
        ("repetition_penalty",),
    ),
    Row(
        "repetition-nan",
        "repetition_penalty NaN",
        _fixed(repetition_penalty=NAN),
        ("repetition_penalty",),
    ),
    Row(
        "bias-outside",
        "logit_bias for an id past the vocabulary",
        lambda target: {"logit_bias": {target.vocab_size: 1.0}},
        ("logit_bias",),
        rough=True,
    ),
    Row(
        "bias-negative",
        "logit_bias for id -1",
        _fixed(logit_bias={-1: 1.0}),
        ("logit_bias",),
        rough=True,
    ),
    Row(
        "bias-nan", "a logit_bias of NaN", _fixed(logit_bias={5: NAN}), ("logit_bias",), rough=True
    ),
    Row(
        "stop-id-outside",
        "a stop id past the vocabulary",
        lambda target: {"stop_token_ids": [target.vocab_size]},
        ("stop_token_ids",),
        rough=True,
    ),
    Row("logprobs-negative", "logprobs -2", _fixed(logprobs=-2), _TOP),
    Row(
        "min-above-max",
        "min_tokens above max_tokens",
        _fixed(min_tokens=9, max_tokens=3),
        ("min_tokens", "min_new_tokens"),
    ),
    Row("rank-negative", "data-parallel rank -1", _fixed(edit=_rank), ("data_parallel_rank",)),
)


def _request(target: Target, row: Row) -> Any:
    options = dict(row.make(target))
    edit = options.pop("edit", None)
    try:
        request = target.request(**options)
    except ValueError as error:
        # top_k is unsigned in some protos: a client cannot even say it.
        raise NotApplicable(f"the proto cannot say it: {error}") from None
    if edit is not None:
        edit(request)
    return request


def _refused(row: Row, history: History) -> None:
    if history.code is grpc.StatusCode.UNIMPLEMENTED:
        raise NotApplicable(f"UNIMPLEMENTED: {history.details}")
    expect(
        history.code is grpc.StatusCode.INVALID_ARGUMENT,
        f"ended {status(history)} with {len(history.messages)} messages",
    )
    expect(not history.messages, f"{len(history.messages)} messages before the refusal")
    named = any(name in history.details for name in row.fields)
    expect(named, f"{history.details!r} does not name {row.fields[0]}")


def _check(row: Row) -> Check:
    async def body(target: Target) -> None:
        request = _request(target, row)
        history = await target.ask(request)
        # SGLang's engine takes 0 for "prefill only": then it must make nothing.
        if row.name == "max-tokens-0" and history.code is grpc.StatusCode.OK:
            made = len(output(history))
            expect(made == 0 and target.dialect.engine == "sglang", f"OK with {made} tokens")
        else:
            _refused(row, history)
        after = await target.ask(target.request(max_tokens=1))
        expect(after.code is grpc.StatusCode.OK, f"the next request ended {status(after)}")

    order = Order.ROUGH if row.rough else Order.GENTLE
    promise = f"{row.about} is INVALID_ARGUMENT naming the field"
    return Check(f"invalid-{row.name}", promise, "validation", order, body)


for _row in ROWS:
    add(_check(_row))


@check(
    "invalid-spares-others",
    "invalid requests leave a running stream whole",
    Order.ROUGH,
)
async def invalid_spares_others(target: Target) -> str:
    tokens = target.tokens_for(1.0, 64)
    alone = output(await target.generate(max_tokens=tokens))
    other = target.send(target.request(max_tokens=tokens))
    expect(await other.first(), f"ended {status(other.history)}")
    bad = []
    for row in ROWS:
        try:
            bad.append(_request(target, row))
        except (NotApplicable, Unsayable):
            continue
    await asyncio.gather(*(target.ask(request) for request in bad))
    ids = output(answered(await other.end()))
    if len(ids) != tokens:
        raise Failed(f"{len(ids)} of {tokens} tokens arrived")
    expect(ids[0] == alone[0], f"first id {ids[0]}, {alone[0]} alone")
    return f"{len(bad)} invalid requests beside {tokens} tokens"
