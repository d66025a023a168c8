"""A place for a servicer that comes after its server.

`grpc.aio` takes services only before a server starts, but an engine that can be built only by
loading it makes its servicer last. A `LateServicer` is registered in its stead: until `fill` every
RPC ends UNAVAILABLE with the board's reason, after it every RPC is the real servicer's.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from typing import Any

import grpc

from smg_grpc_servicer.core.errors import EngineDead, ServicerError, Unavailable
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.status import refuse

Context = grpc.aio.ServicerContext[Any, Any]
Rpc = Callable[[Any, Context], Awaitable[Any]]
Early = Callable[[Any], "ServicerError | None"]
"""Judges a request that comes before its servicer; None leaves it at UNAVAILABLE."""


class LateServicer:
    """Has one attribute for each of `rpcs`; the real one's have to be coroutine functions.

    :param early: by RPC, for those with requests that a later try would not cure.
    """

    def __init__(
        self, rpcs: Iterable[str], board: StatusBoard, *, early: Mapping[str, Early] | None = None
    ) -> None:
        self._rpcs = tuple(rpcs)
        self._board = board
        self._early = dict(early or {})
        self._real: dict[str, Rpc] = {}
        for name in self._rpcs:
            setattr(self, name, self._stand_in(name))

    def fill(self, servicer: object) -> None:
        """From now on `servicer` answers. Once.

        :raises AttributeError: it lacks one of the RPCs.
        """
        if self._real:
            raise RuntimeError("there is a servicer already")
        self._real = {name: getattr(servicer, name) for name in self._rpcs}

    def _stand_in(self, name: str) -> Rpc:
        async def answer(request: Any, context: Context) -> Any:
            if not self._real:
                judge = self._early.get(name)
                known = judge(request) if judge is not None else None
                await refuse(context, known or self._why_not())
            return await self._real[name](request, context)

        return answer

    def _why_not(self) -> ServicerError:
        kind = EngineDead if self._board.death is not None else Unavailable
        return kind(f"not ready: {self._board.reason}")
