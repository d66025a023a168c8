"""A place for a servicer that comes after its server.

`grpc.aio` takes services only before a server starts, but an engine that can be built only by
loading it makes its servicer last. A `LateService` is added in its stead: until `fill` every RPC
ends UNAVAILABLE with the board's reason, after it every RPC is the real servicer's, without a step
between: who serves is looked up for each call.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from types import SimpleNamespace
from typing import Any

import grpc

from smg_grpc_servicer.core.errors import EngineDead, ServicerError, Unavailable
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.status import refuse

Context = grpc.aio.ServicerContext[Any, Any]
Register = Callable[[Any, Any], None]
"""A generated `add_…Servicer_to_server`."""
Early = Callable[[Any], "ServicerError | None"]
"""Judges a request that comes before its servicer; None leaves it at UNAVAILABLE."""


class LateService(grpc.GenericRpcHandler):
    """Serves `rpcs`, the names of one service's methods.

    :param early: by RPC, for those with requests that a later try would not cure.
    """

    def __init__(
        self,
        register: Register,
        rpcs: Iterable[str],
        board: StatusBoard,
        *,
        early: Mapping[str, Early] | None = None,
    ) -> None:
        self._register = register
        self._board = board
        judges = early or {}
        stand_in = SimpleNamespace(**{name: self._stand_in(judges.get(name)) for name in rpcs})
        self._handlers, self._named = _handlers(register, stand_in)
        self._filled = False

    def add_to(self, server: grpc.aio.Server) -> None:
        server.add_generic_rpc_handlers((self,))
        for service, named in self._named.items():
            unary = {
                name: grpc.unary_unary_rpc_method_handler(
                    self._now(f"/{service}/{name}"),
                    handler.request_deserializer,
                    handler.response_serializer,
                )
                for name, handler in named.items()
                if not handler.response_streaming
            }
            server.add_registered_method_handlers(service, unary)

    def fill(self, servicer: object) -> None:
        """From now on `servicer` answers. Once.

        :raises AttributeError: it lacks one of the RPCs.
        """
        if self._filled:
            raise RuntimeError("there is a servicer already")
        self._handlers, _ = _handlers(self._register, servicer)
        self._filled = True

    def service(self, handler_call_details: Any) -> Any:
        """gRPC's question, for each call: who handles it."""
        for handler in self._handlers:
            found = handler.service(handler_call_details)
            if found is not None:
                return found
        return None

    def _now(self, method: str) -> Callable[[Any, Context], Awaitable[Any]]:
        """A method that is added by itself has one handler for ever, so it asks at each call."""
        called = SimpleNamespace(method=method, invocation_metadata=())

        async def answer(request: Any, context: Context) -> Any:
            return await self.service(called).unary_unary(request, context)

        return answer

    def _stand_in(self, judge: Early | None) -> Callable[[Any, Context], Awaitable[Any]]:
        async def answer(request: Any, context: Context) -> Any:
            known = judge(request) if judge is not None else None
            await refuse(context, known or self._why_not())

        return answer

    def _why_not(self) -> ServicerError:
        kind = EngineDead if self._board.death is not None else Unavailable
        return kind(f"not ready: {self._board.reason}")


def _handlers(register: Register, servicer: object) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """What `register` would have given a server: handlers, and by service its methods' by name.

    Older generated code leaves the latter out.
    """
    found: list[Any] = []
    named: dict[str, Any] = {}
    register(
        servicer,
        SimpleNamespace(
            add_generic_rpc_handlers=found.extend,
            add_registered_method_handlers=named.__setitem__,
        ),
    )
    return tuple(found), named
