"""vLLM's exceptions as core errors.

Classes are known by name, so that nothing of vLLM is imported and a class that only some versions
have costs nothing. Sources: `vllm/exceptions.py` and `vllm/v1/engine/exceptions.py` of 0.28 to
0.33. A plain `ValueError` is the caller's fault only where it comes out of vLLM's own validation:
anywhere else it is a bug, and the caller must not be blamed for it.
"""

from __future__ import annotations

import re
from types import TracebackType

from smg_grpc_servicer.core.errors import (
    DeadlineExceeded,
    EngineDead,
    Exhausted,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    ServicerError,
    Unavailable,
)
from smg_grpc_servicer.core.status import innermost
from smg_grpc_servicer.core.types import GenerateSpec

DEAD = "the engine is gone"

_VALIDATION = (
    "vllm.inputs",
    "vllm.pooling_params",
    "vllm.renderers",
    "vllm.sampling_params",
    "vllm.v1.engine.async_llm",
    "vllm.v1.engine.input_processor",
    "vllm.v1.sample.logits_processor",
    "vllm.v1.structured_output",
)
"""Modules whose ValueErrors are about the request."""

_PROMPT_FIELD = "tokenized.input_ids"
_FIELDS = {
    "input_tokens": _PROMPT_FIELD,
    "input_text": "text",
    "prompt": _PROMPT_FIELD,
    "extra_args": "kv_transfer_params_json",
}
"""A validation error's `parameter`, where it is not a sampling parameter."""

_NAMELESS = "request"
_NAMED_FIRST = re.compile(
    r"(n|temperature|top_p|top_k|min_p|(?:presence|frequency|repetition)_penalty|(?:min|max)_tokens"
    r"|seed|stop|stop_token_ids|(?:prompt_)?logprobs|logit_bias) "
)
"""Sampling parameters that vLLM's messages begin with when they name none otherwise."""


def translate(error: Exception) -> Exception:
    """One of `core.errors`, or the error itself when it says nothing to us."""
    if isinstance(error, ServicerError):
        return error
    names = {kind.__name__ for kind in type(error).__mro__}
    if "EngineDeadError" in names:
        return EngineDead(DEAD)
    if "EngineGenerateError" in names:
        cause = error.__cause__
        if isinstance(cause, Exception):
            return translate(cause)
        return Internal(str(error) or "the engine failed the request and did not say why")
    if "GracefulHTTPError" in names:
        return _by_http(getattr(error, "http_status", None), _words(error))
    if "GenerationError" in names:
        return _by_http(getattr(error, "status_code", None), _words(error))
    if "VLLMNotFoundError" in names:
        return NotFound(_words(error))
    if "VLLMClientError" in names or (isinstance(error, ValueError) and _from_validation(error)):
        return _invalid(error)
    return error


def located(error: Exception, spec: GenerateSpec) -> Exception:
    """The same, with the field named that vLLM did not name: what else could be wrong."""
    constraint = spec.sampling.constraint
    if isinstance(error, InvalidArgument) and error.field == _NAMELESS and constraint is not None:
        return InvalidArgument(f"sampling_params.{constraint.kind}", error.reason)
    return error


def _invalid(error: Exception) -> InvalidArgument:
    parameter = getattr(error, "parameter", None)
    if not isinstance(parameter, str) or not parameter:
        words = _words(error)
        begins = _NAMED_FIRST.match(words)
        field = f"sampling_params.{begins[1]}" if begins else _NAMELESS
        return InvalidArgument(field, words)
    field = _FIELDS.get(parameter, f"sampling_params.{parameter}")
    return InvalidArgument(field, str(error.args[0]) if error.args else _words(error))


def _by_http(status: object, words: str) -> Exception:
    """What the front end of vLLM answers over HTTP, over gRPC."""
    number = int(status) if isinstance(status, int) else 500
    if number in (400, 422):
        return InvalidArgument(_NAMELESS, words)
    kinds = {
        404: NotFound,
        408: DeadlineExceeded,
        409: FailedPrecondition,
        429: Exhausted,
        503: Unavailable,
        504: DeadlineExceeded,
    }
    return kinds.get(number, Internal)(words)


def _words(error: Exception) -> str:
    text = str(error).strip()
    if text:
        return text
    cause = innermost(error)
    return str(cause).strip() or type(cause).__name__


def _from_validation(error: Exception) -> bool:
    """Whether it was raised in one of vLLM's checks of a request, or in what it called."""
    trace: TracebackType | None = error.__traceback__
    innermost_of_vllm = ""
    while trace is not None:
        module = str(trace.tb_frame.f_globals.get("__name__", ""))
        if module.startswith("vllm."):
            innermost_of_vllm = module
        trace = trace.tb_next
    return innermost_of_vllm.startswith(_VALIDATION)
