"""How a servicer's methods are answered on a server of ours, whoever wrote the servicer.

- Bytes that are no message of the method's type end INVALID_ARGUMENT, naming that type. `grpc.aio`
  itself ends such a call UNKNOWN with Python's words, which a gateway takes for a fault of this
  worker. Only methods that are coroutine functions and take one protobuf message are looked after.
- A stream's last message travels with its status, where the method offers that (`last_from`). As
  a batch of its own it would cost gRPC one more write, wake-up and turn of the loop, a tenth of
  what a short request costs in all. On the wire nothing tells how a server calls its method, so
  the handler is one for a single answer, which may write before it.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from typing import Any, TypeAlias, TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.status import refuse

Handler: TypeAlias = "grpc.RpcMethodHandler[Any, Any]"
Context = grpc.aio.ServicerContext[Any, Any]
Method = Callable[[Any, Context], Awaitable[Any]]
M = TypeVar("M", bound=Callable[..., Any])

_LAST: dict[Any, str] = {}
"""See `last_from`. Kept beside the functions: a wrapper takes on what stands on them, and it is to
be called."""

_UNPARSED = object()
"""Stands in for the request on its way from the deserializer to the method."""

_NOT_PARSED = (DecodeError, UnicodeDecodeError)  # the latter: protobuf in pure Python


def last_from(name: str) -> Callable[[M], M]:
    """For a streaming method: the servicer's method `name` writes bytes and returns the last."""

    def mark(method: M) -> M:
        _LAST[method] = name
        return method

    return mark


class Handlers(grpc.GenericRpcHandler):
    """What generated code gives a server, each handler changed at its first call.

    Later calls cost a look into a dict; a servicer that comes late (`late`) is seen.
    """

    def __init__(self, given: grpc.GenericRpcHandler) -> None:
        self._given = given
        self._made: dict[str, tuple[Handler, Handler]] = {}
        """By method: the handler as it came, and what takes its place. Known methods only."""

    def service(self, handler_call_details: Any) -> Handler | None:
        handler = self._given.service(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        known = self._made.get(method)
        if known is None or known[0] is not handler:
            known = self._made[method] = handler, as_ours(handler)
        return known[1]


def as_ours(original: Handler) -> Handler:
    """The handler that takes its place; itself where nothing is to be changed."""
    handler: Any = original
    method = handler.unary_stream if handler.response_streaming else handler.unary_unary
    if handler.request_streaming or not inspect.iscoroutinefunction(method):
        return original
    deserialize = handler.request_deserializer
    name = _message_name(deserialize)
    if name is None:
        return original

    def parse(data: bytes) -> Any:
        try:
            return deserialize(data)
        except _NOT_PARSED:
            return _UNPARSED

    make: Any = grpc.unary_unary_rpc_method_handler
    serialize = handler.response_serializer
    if handler.response_streaming:
        last = _LAST.get(getattr(method, "__func__", None))
        if last is None:
            make = grpc.unary_stream_rpc_method_handler
        else:
            method, serialize = getattr(method.__self__, last), None
    made: Handler = make(
        _answer(method, InvalidArgument("request", f"not a valid {name}")), parse, serialize
    )
    return made


def _answer(method: Method, unparsed: InvalidArgument) -> Method:
    async def answer(request: Any, context: Context) -> Any:
        if request is _UNPARSED:
            await refuse(context, unparsed)
        return await method(request, context)

    return answer


def _message_name(deserialize: Callable[[bytes], object] | None) -> str | None:
    """The full name of what it makes of an empty message, which is valid in proto3."""
    if deserialize is None:
        return None
    try:
        message = deserialize(b"")
    except _NOT_PARSED:
        return None
    return str(message.DESCRIPTOR.full_name) if isinstance(message, Message) else None
