"""Exceptions to gRPC status, here and nowhere else.

The codes follow what the gateway does with them (it retries UNAVAILABLE and RESOURCE_EXHAUSTED on
another worker, shows INVALID_ARGUMENT to its client, and holds INTERNAL against this worker).
"""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Any, NoReturn

import grpc

from smg_grpc_servicer.core import errors
from smg_grpc_servicer.core.redaction import MASK, redact_text

log = logging.getLogger(__name__)

MAX_DETAILS_BYTES = 4096
"""Of details as they travel; a client's limit for all headers together is 8 KiB by default, and
what is over it reads RESOURCE_EXHAUSTED there."""

MAX_TEXT = 16 * 1024
"""Characters that are looked at at all: a field may be megabytes, and so may its error."""

_ADDRESS = re.compile(r" at 0x[0-9a-fA-F]{4,}")

CODES: tuple[tuple[type[Exception], grpc.StatusCode], ...] = (
    (errors.InvalidArgument, grpc.StatusCode.INVALID_ARGUMENT),
    (errors.AlreadyExists, grpc.StatusCode.ALREADY_EXISTS),
    (errors.Aborted, grpc.StatusCode.ABORTED),
    (errors.NotFound, grpc.StatusCode.NOT_FOUND),
    (errors.FailedPrecondition, grpc.StatusCode.FAILED_PRECONDITION),
    (errors.Exhausted, grpc.StatusCode.RESOURCE_EXHAUSTED),
    (errors.Unavailable, grpc.StatusCode.UNAVAILABLE),
    (errors.OutOfRange, grpc.StatusCode.OUT_OF_RANGE),
    (errors.DataLoss, grpc.StatusCode.DATA_LOSS),
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
    """Words for the client: never empty, no secret, no object address, short enough to travel."""
    if isinstance(error, errors.ServicerError):
        text = error.message
    else:
        cause = innermost(error)
        text = str(cause).strip()
        text = f"{type(cause).__name__}: {text}" if text else type(cause).__name__
    return presentable(text)


def presentable(text: str) -> str:
    """`text` without what must not leave and cut to what fits."""
    shown = _ADDRESS.sub("", redact_text(text[:MAX_TEXT]))
    if len(text) > MAX_TEXT and len(shown) <= MAX_DETAILS_BYTES:
        # Its end would be seen, and half a credential is not recognised as one.
        shown = shown.rpartition(" ")[0] or MASK
    return _fitting(shown)


def _fitting(text: str) -> str:
    """Cut by the bytes it takes in a header, where all but printable ASCII is percent-encoded."""
    data = text.encode("utf-8", "backslashreplace")
    room = MAX_DETAILS_BYTES
    for end, byte in enumerate(data):
        room -= 1 if 0x20 <= byte <= 0x7E and byte != 0x25 else 3
        if room < 0:
            return data[:end].decode("utf-8", "ignore")
    return data.decode()


async def refuse(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    """End the RPC with the status of `error`; an unknown one is logged with its traceback."""
    status, words = code(error), details(error)
    if status is grpc.StatusCode.INTERNAL:
        log.error("%s", words, exc_info=error)
    else:
        log.debug("refused with %s: %s", status.name, words)
    trailers = error.trailers if isinstance(error, errors.ServicerError) else ()
    await context.abort(status, words, trailers)
    raise AssertionError("context.abort returned")
