"""A scheduler's abort as an error or an end: status codes, constraint failures, plain aborts.

SGLang says why it ended a request in a dictionary: `type`, `message` and `status_code` (HTTP). An
abort without a status is somebody's wish and ends the choice as `abort`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from smg_grpc_servicer.core.errors import (
    DeadlineExceeded,
    Exhausted,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ServicerError,
    Unavailable,
)
from smg_grpc_servicer.core.types import Constraint

CONSTRAINT_TRAILER = ("smg-constraint-failed", "engine")
GRAMMAR_REJECTED = "Grammar accept_token failed"
"""How SGLang's message begins when a token was sampled that the constraint does not allow, which
happens where it allows none. Its status is 500, and this is not a fault of the worker."""

_KINDS: Mapping[int, type[ServicerError]] = {
    404: NotFound,
    408: DeadlineExceeded,
    429: Exhausted,
    502: Unavailable,
    503: Unavailable,
    504: DeadlineExceeded,
}
_FIELDS = {
    "json_schema": "sampling_params.json_schema",
    "regex": "sampling_params.regex",
    "grammar": "sampling_params.ebnf_grammar",
    "structural_tag": "sampling_params.structural_tag",
}


def from_abort(reason: Mapping[str, Any], constraint: Constraint | None) -> Exception | None:
    """The error behind an abort; None when it is a plain one."""
    words = str(reason.get("message") or "").strip() or "the scheduler aborted the request"
    if words.startswith(GRAMMAR_REJECTED):
        return FailedPrecondition(
            f"the engine could not continue the request under its constraint: {words}",
            trailers=(CONSTRAINT_TRAILER,),
        )
    status = reason.get("status_code")
    if status is None:
        return None
    number = int(status)
    if number in (400, 422):
        return InvalidArgument(_field(words, constraint), words)
    return _KINDS.get(number, Internal)(words)


def _field(words: str, constraint: Constraint | None) -> str:
    """What the message is about, where that can be told."""
    if words.startswith("Input length"):
        return "tokenized.input_ids"
    if constraint is not None:
        return _FIELDS.get(constraint.kind, "sampling_params")
    return "request"
