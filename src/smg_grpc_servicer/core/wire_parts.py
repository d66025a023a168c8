"""What several protos have in common; messages with the same fields are handled alike.

Requests: refusing what cannot be served, and telling unset from zero. Responses: log-probability
messages, filled in place by whole lists (building a part first and copying it in, or appending one
by one, costs twice as much).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

from google.protobuf.message import Message as ProtoMessage

from smg_grpc_servicer.core.errors import InvalidArgument, Unsupported
from smg_grpc_servicer.core.types import SCALARS, Feature, Finish, LogprobRows, PromptLogprobs
from smg_grpc_servicer.core.wire import Choice

Message = Any

MAX_DEPTH = 64
"""Levels of a JSON value; what connectors hand over has three or four."""


class Refusals(dict[str, Feature | str]):
    """Path from the message's name (`GenerateRequest.mm_inputs`) to what a client asks for there.

    Not changed once it is made: `refuse` reads the paths from `by_message`.
    """

    def __init__(self, paths: Mapping[str, Feature | str]) -> None:
        super().__init__(paths)
        self.by_message: dict[str, list[tuple[attrgetter[Any], Feature | str]]] = {}
        for path, feature in paths.items():
            name, _, field = path.partition(".")
            self.by_message.setdefault(name, []).append((attrgetter(field), feature))


# Requests.


def refuse(message: Message, refusals: Refusals, who: str) -> None:
    """Raise when a field that stands in `refusals` asks for something.

    A message that is present but empty asks for nothing and passes, and so does a zero.

    :raises Unsupported: naming what was asked for.
    """
    for read, feature in refusals.by_message.get(message.DESCRIPTOR.name, ()):
        value = read(message)
        if value.ListFields() if isinstance(value, ProtoMessage) else value:
            raise Unsupported(who, feature.value if isinstance(feature, Feature) else feature)


def json_object(field: str, text: str) -> dict[str, Any]:
    """A JSON object that any other reader takes too: no NaN, no Infinity, no half a character.

    It goes through other serializers on its way, and those that recurse end at some hundred levels:
    an engine's process would end with them.

    :raises InvalidArgument: naming `field`.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(field, f"must be a JSON object, got {type(value).__name__}")
    _check_parts(field, value)
    return value


def _check_parts(field: str, value: dict[str, Any]) -> None:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        below: list[Any] = []
        for part in level:
            if isinstance(part, dict):
                below += part
                below += part.values()
            elif isinstance(part, list):
                below += part
            elif isinstance(part, str) and not _is_text(part):
                raise InvalidArgument(field, "must be Unicode text, got half a surrogate pair")
        level = below
        if not level:
            return
    raise InvalidArgument(field, f"must not be nested deeper than {MAX_DEPTH} levels")


def _is_text(part: str) -> bool:
    try:
        part.encode()
    except UnicodeEncodeError:
        return False
    return True


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def given(sent: Message, name: str) -> Any:
    """The value of a field that carries presence; None when it is unset."""
    return getattr(sent, name) if sent.HasField(name) else None


def scalars(sent: Message) -> dict[str, Any]:
    """The `SCALARS` that were given: a zero is only where the proto can tell it from unset.

    A `top_k` of -1 is off, where the proto has negative ones.
    """
    found = {
        field.name: value
        for field, value in sent.ListFields()
        if field.name in SCALARS and (value or field.has_presence)  # -0.0 is listed
    }
    if found.get("top_k") == -1:
        del found["top_k"]
    return found


# Responses.


def fill_output(part: Message, token_ids: Sequence[int], rows: LogprobRows) -> None:
    """An `OutputLogProbs`: rows in step with their ids."""
    part.token_logprobs.extend(rows.values)
    part.token_ids.extend(token_ids)
    _fill_top(part.top_logprobs, rows.top_ids, rows.top_values)


def fill_input(part: Message, rows: PromptLogprobs) -> None:
    """An `InputLogProbs`: what has no value (the first token) is an empty entry."""
    for value in rows.values:
        entry = part.token_logprobs.add()
        if value is not None:
            entry.value = value
    part.token_ids.extend(rows.token_ids)
    _fill_top(part.top_logprobs, rows.top_ids, rows.top_values)


def _fill_top(
    target: Message, ids: Sequence[Sequence[int]], values: Sequence[Sequence[float]]
) -> None:
    for row_ids, row_values in zip(ids, values, strict=True):
        row = target.add()
        row.values.extend(row_values)
        row.token_ids.extend(row_ids)


def fill_end(complete: Message, choice: Choice, finish: Finish) -> None:
    """What the end of a choice has in every proto."""
    complete.output_ids.extend(choice.token_ids)
    complete.finish_reason = finish.reason
    complete.prompt_tokens = choice.prompt_tokens
    complete.completion_tokens = len(choice.token_ids)
    complete.cached_tokens = choice.cached_tokens
    complete.index = choice.index


def fill_complete(complete: Message, choice: Choice, finish: Finish) -> None:
    """The same with what MLX's proto lacks."""
    fill_end(complete, choice, finish)
    if isinstance(finish.matched, int):
        complete.matched_token_id = finish.matched
    elif isinstance(finish.matched, str):
        complete.matched_stop_str = finish.matched
    complete.spec_accepted_tokens = count(finish.spec_accepted_tokens)
    complete.spec_draft_tokens = count(finish.spec_draft_tokens)


def count(value: int | None) -> int:
    """An unsigned counter: unknown is the proto's zero, and an engine's odd -1 is no error."""
    return max(value or 0, 0)
