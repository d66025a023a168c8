"""The RPC bodies around a server rather than a request: health, facts, tokenizer, control calls.

Before the engine is ready each of them ends UNAVAILABLE: the gateway takes any OK for ready and
reads the model's facts once. HealthCheck of a server that was ready once answers with a reason.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from time import monotonic, time
from typing import Any, ClassVar, NoReturn

import grpc
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.errors import DeadlineExceeded, FailedPrecondition, Unavailable
from smg_grpc_servicer.core.health import State, StatusBoard
from smg_grpc_servicer.core.requests import RequestTable
from smg_grpc_servicer.core.status import details, presentable, refuse
from smg_grpc_servicer.core.tokenizer import TokenizerSource, chunks
from smg_grpc_servicer.core.types import Feature
from smg_grpc_servicer.core.wire import LiveFacts, Message, Wire

Context = grpc.aio.ServicerContext[Any, Any]

CONTROL_SECONDS = 600.0
"""How long a profiler call may take at the engine; traces are written inside it."""


class ControlBodies:
    """Mixed into `CoreServicer`, which sets these; a wing's servicer sets `wire`."""

    wire: ClassVar[Wire]
    engine: Engine
    board: StatusBoard
    table: RequestTable
    tokenizer: TokenizerSource
    last_receive_at: float | None

    @property
    def started_at(self) -> float:
        """Seconds since the epoch, as the wall clock said when it was set."""
        return self._started_at

    @started_at.setter
    def started_at(self, moment: float) -> None:
        self._started_at = moment
        # Set late, so what has passed is taken along; from here on a wall clock may jump.
        self._started_monotonic = monotonic() - max(0.0, time() - moment)

    async def HealthCheck(self, request: Message, context: Context) -> Message:
        """Agrees with `grpc.health.v1` readiness."""

        async def body() -> Message:
            self._require_started()
            self.board.refresh()
            if not self.board.ready:
                return self.wire.health_response(False, presentable(self.board.reason))
            try:
                await self.engine.check_health()
            except Exception as error:
                known = self.engine.translate(error)
                return self.wire.health_response(False, details(known))
            return self.wire.health_response(True, "OK")

        return await self._unary(context, body)

    async def GetModelInfo(self, request: Message, context: Context) -> Message:
        async def body() -> Message:
            self._require_started()
            return self.wire.model_info(self.engine.model_facts())

        return await self._unary(context, body)

    async def GetServerInfo(self, request: Message, context: Context) -> Message:
        async def body() -> Message:
            self._require_started()
            live = LiveFacts(
                active_requests=self.table.in_flight,
                uptime_seconds=monotonic() - self._started_monotonic,
                started_at=self.started_at,
                last_receive_at=self.last_receive_at,
            )
            return self.wire.server_info(self.engine.server_facts(), live)

        return await self._unary(context, body)

    async def GetLoads(self, request: Message, context: Context) -> Message:
        async def body() -> Message:
            self._require_started()
            self._require_features(frozenset({Feature.LOADS}))
            loads = await self.engine.loads()
            return self.wire.loads_response(
                request, loads, self.engine.server_facts().version or ""
            )

        return await self._unary(context, body)

    async def GetTokenizer(self, request: Message, context: Context) -> None:
        """The model's tokenizer files as a zip, in chunks; its SHA-256 on the last one."""
        try:
            self._require_started()
            bundle = await self.tokenizer.bundle()
            for data, sha256 in chunks(bundle):
                await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=sha256))
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            await refuse(context, self.engine.translate(error))

    async def FlushCache(self, request: Message, context: Context) -> Message:
        """A cache in use is an answer, `success=false`, and no failure of the call."""

        async def body() -> Message:
            self.board.require_accepting()
            self._require_features(frozenset({Feature.FLUSH_CACHE}))
            timeout = self.wire.flush_timeout(request)
            try:
                message = await self.engine.flush_cache(timeout)
            except FailedPrecondition as in_use:
                return common_pb2.FlushCacheResponse(success=False, message=str(in_use))
            return common_pb2.FlushCacheResponse(success=True, message=message)

        return await self._unary(context, body)

    async def StartProfile(self, request: Message, context: Context) -> Message:
        spec = self.wire.profile_spec(request)
        return await self._profile(context, lambda: self.engine.start_profile(spec))

    async def StopProfile(self, request: Message, context: Context) -> Message:
        return await self._profile(context, self.engine.stop_profile)

    async def SubscribeKvEvents(self, request: Message, context: Context) -> None:
        await refuse(context, self.engine.unsupported(Feature.KV_EVENTS))

    # Shared by all bodies.

    async def _profile(self, context: Context, call: Callable[[], Awaitable[str]]) -> Message:
        async def body() -> Message:
            self.board.require_accepting()
            self._require_features(frozenset({Feature.PROFILE}))
            try:
                message = await asyncio.wait_for(call(), CONTROL_SECONDS)
            except asyncio.TimeoutError:
                raise DeadlineExceeded(
                    f"the engine's profiler did not answer in {CONTROL_SECONDS:g} s"
                ) from None
            return common_pb2.ProfileResponse(success=True, message=message)

        return await self._unary(context, body)

    async def _unary(self, context: Context, body: Callable[[], Awaitable[Message]]) -> Message:
        """Run a body; its errors become a status in one way."""
        try:
            return await body()
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            return await self._refused(context, error)

    async def _refused(self, context: Context, error: Exception) -> NoReturn:
        await refuse(context, self.engine.translate(error))

    def _require_started(self) -> None:
        """:raises Unavailable: the engine never was ready."""
        if self.board.state in (State.LOADING, State.WARMING):
            raise Unavailable(f"not ready: {self.board.reason}")

    def _require_features(self, needs: frozenset[Feature]) -> None:
        """One missing feature at a time, in the order the vocabulary lists them."""
        missing = needs - self.engine.features
        if not missing:
            return
        for feature in Feature:
            if feature in missing:
                raise self.engine.unsupported(feature)
