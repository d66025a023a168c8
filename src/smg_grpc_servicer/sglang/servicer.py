"""`SGLangSchedulerServicer(request_manager, server_args, …)`: SGLang's scheduler over gRPC.

Importing this module imports no SGLang. `SglangServicerBase` serves the same proto from any engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from time import monotonic
from typing import TYPE_CHECKING, Any

import grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc

from smg_grpc_servicer.core import boards
from smg_grpc_servicer.core.health import State, StatusBoard
from smg_grpc_servicer.core.metrics import Metrics
from smg_grpc_servicer.core.pace import LONGEST
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.core.stall import EngineProgress, latest
from smg_grpc_servicer.core.status import refuse
from smg_grpc_servicer.core.tracing import Spans
from smg_grpc_servicer.core.wire import Message
from smg_grpc_servicer.sglang import kv_events
from smg_grpc_servicer.sglang.adapter_calls import AdapterCalls
from smg_grpc_servicer.sglang.wire import SglangWire

if TYPE_CHECKING:
    from smg_grpc_servicer.sglang.adapter import SglangEngine
    from smg_grpc_servicer.sglang.loads import LoadReader
    from smg_grpc_servicer.sglang.parts import Parts

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

FRESH_SECONDS = 1.0
"""Who showed life so recently needs no closer look."""


class SglangServicerBase(
    AdapterCalls, CoreServicer, sglang_scheduler_pb2_grpc.SglangSchedulerServicer
):
    """Serves `sglang.grpc.scheduler.SglangScheduler` from any `Engine`."""

    wire = SglangWire()


def sign_of_life(manager: Any, reader: LoadReader | None) -> float | None:
    """When the scheduler last sent anything, or reported: it does so after every step."""
    last: float | None = manager.last_receive
    if reader is None or (last is not None and monotonic() - last < FRESH_SECONDS):
        return last
    return latest(last, reader.last_report())


class SGLangSchedulerServicer(SglangServicerBase):
    """Over a request manager whose ranks are ready; built on a running loop.

    Without a `board` nobody of ours runs the server: it says what a `SGLangHealthServicer` over the
    same manager says.

    :param model_info: model facts that replace SGLang's own, by GetModelInfo's names.
    :param scheduler_info: the first rank's ready report.
    :param health_servicer: accepted for those who pass it; the two share a board anyway.
    """

    engine: SglangEngine

    def __init__(
        self,
        request_manager: Any,
        server_args: Any,
        model_info: Mapping[str, Any] | None = None,
        scheduler_info: Mapping[str, Any] | None = None,
        health_servicer: object | None = None,
        *,
        parts: Parts | None = None,
        board: StatusBoard | None = None,
        metrics: Metrics | None = None,
        spans: Spans | None = None,
        max_chunk_tokens: int | None = None,
        coalesce_seconds: float = LONGEST,
    ) -> None:
        # It needs pyzmq, which the base does not.
        from smg_grpc_servicer.sglang.parts import Parts

        made = parts or Parts.of(server_args)
        if board is not None:
            boards.share(request_manager, board)
        engine = made.engine(request_manager, scheduler_info or {}, model_info)
        super().__init__(
            engine,
            boards.of(request_manager),
            metrics=metrics,
            spans=spans,
            max_chunk_tokens=max_chunk_tokens,
            coalesce_seconds=coalesce_seconds,
        )
        self._reader = made.reader
        self.board.progress = EngineProgress(
            self.table, lambda: sign_of_life(request_manager, made.reader)
        )
        self.kv_events = kv_events.service(
            made.config,
            lambda: kv_events.sampler(
                engine,
                self.table,
                lambda: [
                    request_manager.last_receive,
                    None if made.reader is None else made.reader.reported,
                ],
            ),
            self.board,
        )

    def lost(self, reason: str) -> None:
        """The ranks are gone; told by who watches them."""
        if self.board.state.order >= State.DRAINING.order and not self.table.in_flight:
            log.info("the ranks ended while the server stops")
            return
        self.engine.died(reason)

    async def SubscribeKvEvents(self, request: Message, context: Context) -> None:
        if self.kv_events is None:
            await refuse(context, kv_events.NONE)
        await self.kv_events.subscribe(request, context)

    async def close(self) -> None:
        """Drop what is open; for those who take a servicer out of service."""
        if self.kv_events is not None:
            await self.kv_events.close()
        await self.engine.close()
        if self._reader is not None:
            await asyncio.to_thread(self._reader.close)

    def statistics(self) -> dict[str, int]:
        events = self.kv_events.statistics() if self.kv_events is not None else {}
        return {
            **super().statistics(),
            **self.engine.statistics(),
            **{f"kv_{name}": value for name, value in events.items()},
        }
