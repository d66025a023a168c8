"""What several protos have in common; messages with the same fields are handled alike.

Requests: refusing what cannot be served, and the fields that SGLang's
and TokenSpeed's protos share. Responses: log-probability messages, filled in place by whole lists
(building a part first and copying it in, or appending one by one, costs twice as much).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from operator import attrgetter
from typing import Any, NoReturn

from google.protobuf.message import Message as ProtoMessage

from smg_grpc_servicer.core.errors import InvalidArgument, Unsupported
from smg_grpc_servicer.core.types import (
    Constraint,
    Feature,
    Finish,
    KvTransfer,
    LogprobRows,
    LogprobSpec,
    PromptLogprobs,
)
from smg_grpc_servicer.core.wire import Choice

Message = Any


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
    """A JSON object, strictly: NaN and Infinity are no JSON and would stop other readers.

    :raises InvalidArgument: naming `field`.
    """
    try:
        value = json.loads(text, parse_constant=_no_constant, parse_float=_finite)
    except (ValueError, RecursionError) as error:
        raise InvalidArgument(field, f"must be a JSON object: {error}") from error
    if not isinstance(value, dict):
        raise InvalidArgument(field, f"must be a JSON object, got {type(value).__name__}")
    return value


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _finite(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"{text} is too large")
    return value


def text_constraint(sent: Message, kinds: Mapping[str, str]) -> Constraint | None:
    """The `constraint` oneof where every member is a text; an empty text constrains nothing."""
    member = sent.WhichOneof("constraint")
    if member is None or not (value := getattr(sent, member)):
        return None
    return Constraint(kinds[member], value)


def integer_bias(field: str, bias: Mapping[str, float]) -> dict[int, float]:
    """:raises InvalidArgument: naming the key that is no integer."""
    result = {}
    for key, value in bias.items():
        # int() also takes "1_0", " 1" and other alphabets' digits.
        if not key.removeprefix("-").isdecimal() or not key.isascii():
            raise InvalidArgument(field, f"keys are token ids, got {key!r}")
        result[int(key)] = value
    return result


def bootstrap(field: str, host: str, port: int, room: int) -> KvTransfer:
    """Where prefill and decode meet; no host and port 0 mean the engine's own.

    :raises InvalidArgument: naming the part.
    """
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"{field}.bootstrap_port", f"must be a port, got {port}")
    if room < 0:
        raise InvalidArgument(f"{field}.bootstrap_room", f"must not be negative, got {room}")
    return KvTransfer(host=host or None, port=port or None, room=room)


def logprob_spec(request: Message, start: int) -> LogprobSpec:
    """SGLang's four options in one; without `return_logprob` the other three mean nothing.

    :param start: first prompt position that gets a row; -1 for none.
    :raises InvalidArgument: naming the field.
    """
    if not request.return_logprob:
        return LogprobSpec()
    top = request.top_logprobs_num
    if top < 0:
        raise InvalidArgument("top_logprobs_num", f"must not be negative, got {top}")
    length = len(request.tokenized.input_ids)
    if not -1 <= start <= length:
        raise InvalidArgument(
            "logprob_start_len",
            f"must be -1 (none) or a position in the prompt of {length} tokens, got {start}",
        )
    return LogprobSpec(
        output=top,
        prompt=top if start >= 0 else None,
        prompt_start=max(start, 0),
        token_ids=tuple(request.token_ids_logprob),
    )


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


def fill_complete(complete: Message, choice: Choice, finish: Finish) -> None:
    """What the end of a choice has in vLLM's, SGLang's and TokenSpeed's protos alike."""
    complete.output_ids.extend(choice.token_ids)
    complete.finish_reason = finish.reason
    complete.prompt_tokens = choice.prompt_tokens
    complete.completion_tokens = len(choice.token_ids)
    complete.cached_tokens = choice.cached_tokens
    complete.index = choice.index
    if isinstance(finish.matched, int):
        complete.matched_token_id = finish.matched
    elif isinstance(finish.matched, str):
        complete.matched_stop_str = finish.matched
    complete.spec_accepted_tokens = count(finish.spec_accepted_tokens)
    complete.spec_draft_tokens = count(finish.spec_draft_tokens)


def count(value: int | None) -> int:
    """An unsigned counter: unknown is the proto's zero, and an engine's odd -1 is no error."""
    return max(value or 0, 0)
