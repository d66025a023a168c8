"""vLLM's exceptions as core errors.

Classes are known by name, so that nothing of vLLM is imported and a class that only some versions
have costs nothing. Sources: `vllm/exceptions.py` and `vllm/v1/engine/exceptions.py` of 0.28 to
0.33. A plain `ValueError` is the caller's fault only where it comes out of vLLM's own validation:
anywhere else it is a bug, and the caller must not be blamed for it.
"""

from __future__ import annotations

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
_FIELDS = {"input_tokens": _PROMPT_FIELD, "input_text": "text", "prompt": _PROMPT_FIELD}
"""A validation error's `parameter`, where it is not a sampling parameter."""


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


def _invalid(error: Exception) -> InvalidArgument:
    parameter = getattr(error, "parameter", None)
    if not isinstance(parameter, str) or not parameter:
        return InvalidArgument("request", _words(error))
    field = _FIELDS.get(parameter, f"sampling_params.{parameter}")
    return InvalidArgument(field, str(error.args[0]) if error.args else _words(error))


def _by_http(status: object, words: str) -> Exception:
    """What the front end of vLLM answers over HTTP, over gRPC."""
    number = int(status) if isinstance(status, int) else 500
    if number in (400, 422):
        return InvalidArgument("request", words)
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
    """Whether the frame that raised is one of vLLM's checks of a request."""
    trace: TracebackType | None = error.__traceback__
    if trace is None:
        return False
    while trace.tb_next is not None:
        trace = trace.tb_next
    module = str(trace.tb_frame.f_globals.get("__name__", ""))
    return module.startswith(_VALIDATION)
