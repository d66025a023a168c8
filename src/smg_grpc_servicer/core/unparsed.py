"""Bytes that are no message of the method's type end INVALID_ARGUMENT, naming that type.

`grpc.aio` itself ends such a call UNKNOWN with Python's words, which a gateway takes for a fault
of this worker. Only methods that are coroutine functions and take one protobuf message are
looked after; the others stay as they are.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias

import grpc
from google.protobuf.message import DecodeError, Message

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.status import refuse

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]

_UNPARSED = object()
"""Stands in for the request on its way from the deserializer to the method."""

_NOT_PARSED = (DecodeError, UnicodeDecodeError)  # the latter: protobuf in pure Python


class RefuseUnparsed(grpc.aio.ServerInterceptor):
    """A method's handler is wrapped at its first call; later ones cost a look into a dict."""

    def __init__(self) -> None:
        self._wrapped: dict[str, tuple[Handler, Handler]] = {}
        """By method: the handler as it came, and what takes its place. Known methods only."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Handler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        details: Any = handler_call_details
        known = self._wrapped.get(details.method)
        if known is None or known[0] is not handler:
            known = self._wrapped[details.method] = handler, _wrap(handler)
        return known[1]


def _wrap(original: Handler) -> Handler:
    handler: Any = original
    method = handler.unary_stream if handler.response_streaming else handler.unary_unary
    if handler.request_streaming or not inspect.iscoroutinefunction(method):
        return original
    deserialize = handler.request_deserializer
    name = _message_name(deserialize)
    if name is None:
        return original
    error = InvalidArgument("request", f"not a valid {name}")

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except _NOT_PARSED:
            return _UNPARSED

    async def answer(request: Any, context: Context) -> Any:
        if request is _UNPARSED:
            await refuse(context, error)
        return await method(request, context)

    make = (
        grpc.unary_stream_rpc_method_handler
        if handler.response_streaming
        else grpc.unary_unary_rpc_method_handler
    )
    made: Handler = make(answer, parse, handler.response_serializer)
    return made


def _message_name(deserialize: Callable[[bytes], object] | None) -> str | None:
    """The full name of what it makes of an empty message, which is valid in proto3."""
    if deserialize is None:
        return None
    try:
        message = deserialize(b"")
    except _NOT_PARSED:
        return None
    return str(message.DESCRIPTOR.full_name) if isinstance(message, Message) else None
