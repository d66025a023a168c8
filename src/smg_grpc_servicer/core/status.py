"""Exceptions to gRPC status, here and nowhere else.

The codes follow what the gateway does with them (it retries UNAVAILABLE and RESOURCE_EXHAUSTED on
another worker, shows INVALID_ARGUMENT to its client, and holds INTERNAL against this worker).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, NoReturn

import grpc

from smg_grpc_servicer.core import errors
from smg_grpc_servicer.core.facts import redact_text

log = logging.getLogger(__name__)

MAX_DETAILS = 2000
"""Characters of details; headers have a limit of their own on the way (8 KiB by default)."""

CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (errors.InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Exhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.DeadlineExceeded, grpc.StatusCode.DEADLINE_EXCEEDED),
    (errors.Unsupported, grpc.StatusCode.UNIMPLEMENTED),
    (errors.Internal, grpc.StatusCode.INTERNAL),
    (asyncio.TimeoutError, grpc.StatusCode.DEADLINE_EXCEEDED),
)
"""First match wins; whatever is not here is INTERNAL."""


def code(error: Exception) -> grpc.StatusCode:
    for kind, status in CODES:
        if isinstance(error, kind):
            return status
    return grpc.StatusCode.INTERNAL


def innermost(error: BaseException) -> BaseException:
    """The cause at the bottom of a chain; cycles end the walk."""
    seen: set[int] = set()
    while id(error) not in seen:
        seen.add(id(error))
        cause = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
        if cause is None:
            break
        error = cause
    return error


def details(error: Exception) -> str:
    """Words for the client: never empty, no secret, no object address."""
    if isinstance(error, errors.ServicerError):
        text = error.message
    else:
        cause = innermost(error)
        text = str(cause).strip()
        text = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    return redact_text(text)[:MAX_DETAILS]


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the RPC with the status of `error`; an unknown one is logged with its traceback."""
    status = code(error)
    if status is grpc.StatusCode.INTERNAL:
        log.error("%s", details(error), exc_info=error)
    else:
        log.debug("refused with %s: %s", status.name, details(error))
    trailers = error.trailers if isinstance(error, errors.ServicerError) else ()
    await context.abort(status, details(error), trailers)
    raise AssertionError("context.abort returned")
