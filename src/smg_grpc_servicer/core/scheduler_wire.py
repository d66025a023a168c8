"""What SGLang's and TokenSpeed's protos have alike: one was made after the other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from smg_grpc_servicer.core import facts as config
from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.types import Constraint, KvTransfer, LogprobSpec, Sampling, ServerFacts
from smg_grpc_servicer.core.wire import LiveFacts, Message, Wire
from smg_grpc_servicer.core.wire_parts import given, scalars

CONSTRAINTS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""By member of the oneof."""


class SchedulerWire(Wire):
    """Calls that both have alike."""

    version_field: ClassVar[str]
    """Of GetServerInfo: the engine's release."""

    def abort_ids(self, request: Message) -> Sequence[str]:
        return [request.request_id]

    def abort_response(self, found: Sequence[str]) -> Message:
        """An id that is not here is a success too, so that an abort can be repeated."""
        return self.proto.AbortResponse(
            success=True, message="aborted" if found else "not in flight"
        )

    def server_info(self, facts: ServerFacts, live: LiveFacts) -> Message:
        answer = super().server_info(facts, live)
        answer.server_args.CopyFrom(config.to_struct(facts.server_args))
        answer.scheduler_info.CopyFrom(config.to_struct(facts.scheduler_info))
        capacity = config.count(facts.scheduler_info.get("max_total_num_tokens"))
        answer.max_total_num_tokens = capacity or 0
        setattr(answer, self.version_field, facts.version or "")
        return answer


def sampling(sent: Message, **own: Any) -> Sampling:
    """:param own: what one of the two has in a way of its own."""
    return Sampling(
        **{**scalars(sent), **own},
        max_tokens=given(sent, "max_new_tokens"),
        min_tokens=sent.min_new_tokens or None,
        stop=tuple(sent.stop),
        stop_token_ids=tuple(sent.stop_token_ids),
        ignore_eos=sent.ignore_eos,
        skip_special_tokens=sent.skip_special_tokens,
        spaces_between_special_tokens=sent.spaces_between_special_tokens,
        include_stop=sent.no_stop_trim,
        n=sent.n or 1,
        logit_bias=_integer_bias("sampling_params.logit_bias", sent.logit_bias),
        constraint=_constraint(sent),
    )


def _constraint(sent: Message) -> Constraint | None:
    """Every member is a text; an empty one constrains nothing."""
    member = sent.WhichOneof("constraint")
    if member is None or not (value := getattr(sent, member)):
        return None
    return Constraint(CONSTRAINTS[member], value)


def _integer_bias(field: str, bias: Mapping[str, float]) -> dict[int, float]:
    """:raises InvalidArgument: naming the key that is no integer."""
    result = {}
    for key, value in bias.items():
        # int() also takes "1_0", " 1" and other alphabets' digits.
        if not key.removeprefix("-").isdecimal() or not key.isascii():
            raise InvalidArgument(field, f"keys are token ids, got {key!r}")
        result[int(key)] = value
    return result


def bootstrap(request: Message, field: str) -> KvTransfer | None:
    """Where prefill and decode meet; no host and port 0 mean the engine's own.

    :raises InvalidArgument: naming the part.
    """
    if not request.HasField(field):
        return None
    sent = getattr(request, field)
    host, port, room = sent.bootstrap_host, sent.bootstrap_port, sent.bootstrap_room
    if not 0 <= port <= 65535:
        raise InvalidArgument(f"{field}.bootstrap_port", f"must be a port, got {port}")
    if room < 0:
        raise InvalidArgument(f"{field}.bootstrap_room", f"must not be negative, got {room}")
    return KvTransfer(host=host or None, port=port or None, room=room)


def logprob_spec(request: Message, start: int) -> LogprobSpec:
    """Four options in one; without `return_logprob` the other three mean nothing.

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
