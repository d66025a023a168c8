"""`VllmEngineServicer(async_llm, start_time)`: what vLLM's gRPC launchers build.

Importing this module imports no vLLM. `VllmServicerBase` serves the same proto from any engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from smg_grpc_servicer.core import boards
from smg_grpc_servicer.core.errors import AlreadyExists
from smg_grpc_servicer.core.health import State, StatusBoard
from smg_grpc_servicer.core.metrics import Metrics
from smg_grpc_servicer.core.options import COALESCE_SECONDS, EXIT_ON_DEATH, MAX_CHUNK_TOKENS
from smg_grpc_servicer.core.requests import Ticket
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.core.settings import Settings
from smg_grpc_servicer.core.stall import EngineProgress
from smg_grpc_servicer.core.status import refuse
from smg_grpc_servicer.core.tracing import Spans
from smg_grpc_servicer.core.wire import Message
from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.vllm import handover, impl, kv_events
from smg_grpc_servicer.vllm.adapter import VllmEngine
from smg_grpc_servicer.vllm.watch import EngineWatch, exit_later
from smg_grpc_servicer.vllm.wire import VllmWire

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]


class VllmServicerBase(CoreServicer, vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves `vllm.grpc.engine.VllmEngine` from any `Engine`."""

    wire = VllmWire()


class VllmEngineServicer(VllmServicerBase):
    """Built on a running loop, over an `AsyncLLM` that is ready to serve.

    Without a `board` nobody of ours runs the server: it is SERVING at once, and when the engine
    dies the process ends with code 1 after `SMG_SERVICER_EXIT_ON_ENGINE_DEATH_SECONDS` (default
    10; 0 = stay up, not alive). With one, its owner decides both.

    :param start_time: seconds since the epoch.
    :param mm_settings: accepted for launchers that pass it; media is not served yet.
    :raises RuntimeError: this process was to serve from Rust (`impl`).
    """

    engine: VllmEngine

    def __init__(
        self,
        async_llm: Any,
        start_time: float,
        mm_settings: object | None = None,
        *,
        board: StatusBoard | None = None,
        metrics: Metrics | None = None,
        spans: Spans | None = None,
        max_chunk_tokens: int | None = None,
        coalesce_seconds: float | None = None,
    ) -> None:
        impl.require_python()
        values = Settings(EXIT_ON_DEATH, MAX_CHUNK_TOKENS, COALESCE_SECONDS).resolve()
        owned = board is not None
        if board is not None:
            boards.share(async_llm, board)
        engine = VllmEngine(async_llm)
        super().__init__(
            engine,
            boards.of(async_llm),
            metrics=metrics,
            spans=spans,
            max_chunk_tokens=max_chunk_tokens or values.get_value(MAX_CHUNK_TOKENS),
            coalesce_seconds=(
                values.get_value(COALESCE_SECONDS) if coalesce_seconds is None else coalesce_seconds
            ),
        )
        self.board.progress = EngineProgress(self.table, engine.stats.sign_of_life)
        self.kv_events = kv_events.service(async_llm, engine, self.table, self.board)
        self.started_at = start_time
        self._exit_seconds = 0.0 if owned else values.get_value(EXIT_ON_DEATH)
        self._exit: asyncio.TimerHandle | None = None
        self._watch = EngineWatch(async_llm, self._lost)
        self._watch.start()
        if not owned:
            self.board.serving()

    def _lost(self, reason: str) -> None:
        if self.board.state.order >= State.DRAINING.order and not self.table.in_flight:
            log.info("the engine ended while the server stops")
            return
        self.engine.died(reason)
        self._exit = exit_later(self._exit_seconds)

    def _around(self, request: Message) -> AbstractContextManager[object]:
        decode = handover.Handover.of(request)
        return super()._around(request) if decode is None else self._announced(decode)

    @contextmanager
    def _announced(self, decode: handover.Handover) -> Iterator[None]:
        """A prefill waits for this request: its connector hears of it if the engine does not."""
        try:
            with handover.opened(decode):
                yield
        finally:
            if not decode.taken:
                self.engine.rejected(decode)

    def _admit(self, request_id: str, choices: int, *, stream: bool) -> Ticket:
        try:
            return super()._admit(request_id, choices, stream=stream)
        except AlreadyExists:
            # The one in flight has the blocks.
            handover.taken()
            raise

    async def HealthCheck(self, request: Message, context: Context) -> Message:
        self._watch.check()
        return await super().HealthCheck(request, context)

    async def GetServerInfo(self, request: Message, context: Context) -> Message:
        await self.engine.look_at_pause()
        return await super().GetServerInfo(request, context)

    async def SubscribeKvEvents(self, request: Message, context: Context) -> None:
        if self.kv_events is None:
            await refuse(context, kv_events.NONE)
        await self.kv_events.subscribe(request, context)

    async def close(self) -> None:
        """Stop watching and drop what is open; for those who take a servicer out of service."""
        self._watch.close()
        if self._exit is not None:
            self._exit.cancel()
        if self.kv_events is not None:
            await self.kv_events.close()
            auto.clean()
        await self.engine.close()

    def statistics(self) -> dict[str, int]:
        events = self.kv_events.statistics() if self.kv_events is not None else {}
        return {
            **super().statistics(),
            **self.engine.statistics(),
            **self._watch.statistics(),
            **{f"kv_{name}": value for name, value in events.items()},
        }
