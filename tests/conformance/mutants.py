"""Servicers that break one promise each, made from ours by spoiling what they write or do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from smg_grpc_servicer.core.health import HealthServicer, StatusBoard
from smg_grpc_servicer.mlx.servicer import MlxEngineServicer
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from tests.conformance.spoilers import Spoil, as_it_is


class Writing:
    """A context that spoils what is written to it."""

    def __init__(self, context: Any, spoil: Spoil) -> None:
        self._context, self._spoil = context, spoil
        self._memory: list[int] = []

    async def write(self, message: pb.GenerateResponse) -> None:
        for other in self._spoil(message, self._memory):
            await self._context.write(other)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def writing(spoil: Spoil) -> type[MlxEngineServicer]:
    """Our servicer with a spoilt pen."""

    class Spoilt(MlxEngineServicer):
        async def Generate(self, request: Any, context: Any) -> None:
            pen: Any = Writing(context, spoil)
            await super().Generate(request, pen)

    return Spoilt


class Requesting(MlxEngineServicer):
    """Our servicer with a change to each request before it is looked at."""

    def spoil(self, request: Any) -> Any:
        raise NotImplementedError

    async def Generate(self, request: Any, context: Any) -> None:
        await super().Generate(self.spoil(request), context)


class OffByOne(Requesting):
    def spoil(self, request: Any) -> Any:
        request.sampling_params.max_tokens += 1
        return request


class IgnoresSeed(Requesting):
    """F9, P4: each run has a seed of its own."""

    runs = 0

    def spoil(self, request: Any) -> Any:
        if request.sampling_params.HasField("seed"):
            IgnoresSeed.runs += 1
            request.sampling_params.seed = IgnoresSeed.runs
        return request


class OneSeed(Requesting):
    def spoil(self, request: Any) -> Any:
        request.sampling_params.seed = 1
        return request


class IgnoresEos(Requesting):
    def spoil(self, request: Any) -> Any:
        request.sampling_params.ignore_eos = True
        return request


class IgnoresStopIds(Requesting):
    def spoil(self, request: Any) -> Any:
        request.sampling_params.ClearField("stop_token_ids")
        return request


class ClampsEverything(Requesting):
    """Makes something valid of invalid numbers instead of refusing them."""

    def spoil(self, request: Any) -> Any:
        params = request.sampling_params
        params.temperature, params.top_p, params.min_p = 0.0, 1.0, 0.0
        return request


class AcceptsDuplicates(Requesting):
    """Every request gets an id of its own, so that Abort finds none of them."""

    def spoil(self, request: Any) -> Any:
        self.started_at += 1
        request.request_id += f"-{self.started_at}"
        return request


class MixesPrompts(Requesting):
    """Streams that run at once get the prompt of the first of them."""

    first: tuple[int, ...] = ()

    def spoil(self, request: Any) -> Any:
        if self.table.in_flight == 0 or not self.first:
            self.first = tuple(request.tokenized.input_ids)
        request.tokenized.input_ids[:] = self.first
        return request


class SwallowsAbort(MlxEngineServicer):
    async def Abort(self, request: Any, context: Any) -> Any:
        return pb.AbortResponse()


class AbortNeedsAnId(MlxEngineServicer):
    async def Abort(self, request: Any, context: Any) -> Any:
        if not self.abort(request.request_ids):
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such request")
        return pb.AbortResponse()


class AbortsByPrefix(MlxEngineServicer):
    async def Abort(self, request: Any, context: Any) -> Any:
        running = list(self.table._tickets)
        self.abort([i for i in running if any(i.startswith(p) for p in request.request_ids)])
        return pb.AbortResponse()


class AbortEndsQuietly(MlxEngineServicer):
    """The published MLX servicer's way: OK, and no complete."""

    async def Generate(self, request: Any, context: Any) -> None:
        def spoil(message: Any, memory: list[int]) -> Iterator[Any]:
            if message.complete.finish_reason != "abort":
                yield message

        pen: Any = Writing(context, spoil)
        await super().Generate(request, pen)


class CancelLeaks(MlxEngineServicer):
    """V1: a client that left goes on being served."""

    async def Generate(self, request: Any, context: Any) -> None:
        class Deaf(Writing):
            async def write(self, message: Any) -> None:
                try:
                    await self._context.write(message)
                except asyncio.CancelledError:
                    raise
                except Exception:
                    return

        pen: Any = Deaf(context, as_it_is)
        await asyncio.shield(asyncio.ensure_future(super().Generate(request, pen)))


class NamesNoField(MlxEngineServicer):
    async def Generate(self, request: Any, context: Any) -> None:
        class Vague(Writing):
            async def abort(self, code: Any, details: str, trailers: Any = ()) -> None:
                await self._context.abort(code, "bad request", trailers)

        pen: Any = Vague(context, as_it_is)
        await super().Generate(request, pen)


class SaysInternal(MlxEngineServicer):
    async def Generate(self, request: Any, context: Any) -> None:
        class Blunt(Writing):
            async def abort(self, code: Any, details: str, trailers: Any = ()) -> None:
                await self._context.abort(grpc.StatusCode.INTERNAL, details, trailers)

        pen: Any = Blunt(context, as_it_is)
        await super().Generate(request, pen)


class DiesOfBadInput(MlxEngineServicer):
    """P1: one bad request, and it is over for everyone."""

    async def Generate(self, request: Any, context: Any) -> None:
        if not request.tokenized.input_ids:
            assert isinstance(self.engine, FakeEngine)
            self.engine.die("index out of range")
        await super().Generate(request, context)


class DeadButHealthy(MlxEngineServicer):
    """O1, O2: the engine is gone, the front end smiles."""

    async def Generate(self, request: Any, context: Any) -> None:
        await context.abort(grpc.StatusCode.UNAVAILABLE, "the engine is gone")


class SaysUnhealthy(MlxEngineServicer):
    async def HealthCheck(self, request: Any, context: Any) -> Any:
        return pb.HealthCheckResponse(healthy=False, message="shutting down")


class SaysNull(MlxEngineServicer):
    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        info = await super().GetModelInfo(request, context)
        info.served_model_name = "null"
        return info


class NotGenerative(MlxEngineServicer):
    async def GetModelInfo(self, request: Any, context: Any) -> Any:
        info = await super().GetModelInfo(request, context)
        info.is_generation = False
        return info


class TellsSecrets(MlxEngineServicer):
    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        info = await super().GetServerInfo(request, context)
        info.server_type = "mlx --api-key 0123456789abcdef"
        return info


class CountsNothing(MlxEngineServicer):
    async def GetServerInfo(self, request: Any, context: Any) -> Any:
        info = await super().GetServerInfo(request, context)
        info.active_requests = 0
        return info


class HashOnEveryChunk(MlxEngineServicer):
    async def GetTokenizer(self, request: Any, context: Any) -> None:
        bundle = await self.tokenizer.bundle()
        half = len(bundle.data) // 2
        for data in (bundle.data[:half], bundle.data[half:]):
            await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=bundle.sha256))


class NewZipEachTime(MlxEngineServicer):
    calls = 0

    async def GetTokenizer(self, request: Any, context: Any) -> None:
        import hashlib
        import io
        import zipfile

        NewZipEachTime.calls += 1
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("model/tokenizer.json", f'{{"made": {NewZipEachTime.calls}}}')
        data = buffer.getvalue()
        digest = hashlib.sha256(data).hexdigest()
        await context.write(common_pb2.GetTokenizerChunk(data=data, sha256=digest))


class WatchEnds(HealthServicer):
    """V2: what the published servicers do."""

    async def Watch(self, request: Any, context: Any) -> None:
        status: Any = self.status(request.service)
        await context.write(health_pb2.HealthCheckResponse(status=status))


class KnowsEveryName(health_pb2_grpc.HealthServicer):
    def __init__(self, board: StatusBoard, names: list[str]) -> None:
        pass

    async def Check(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class SlowToTell(HealthServicer):
    async def Check(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(1.2)
        return await super().Check(request, context)
