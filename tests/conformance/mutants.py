"""Servicers that break one promise each, made from ours by spoiling what they write or do."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from smg_grpc_servicer.core.health import HealthServicer, StatusBoard
from smg_grpc_servicer.mlx.servicer import MlxEngineServicer
from smg_grpc_servicer.testing.fake_engine import FakeEngine

Spoil = Callable[[pb.GenerateResponse, list[int]], Iterator[pb.GenerateResponse]]
"""What goes out instead of a message; the list keeps state for one stream."""


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
            await super().Generate(request, Writing(context, spoil))

    return Spoilt


def _of(message: pb.GenerateResponse) -> Any:
    return message.chunk if message.HasField("chunk") else message.complete


def empty_chunk(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    yield message
    if message.HasField("chunk"):
        counted = pb.GenerateStreamChunk(completion_tokens=message.chunk.completion_tokens)
        yield pb.GenerateResponse(chunk=counted)


def cumulative(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    if message.HasField("chunk"):
        memory += message.chunk.token_ids
        message.chunk.ClearField("token_ids")
        message.chunk.token_ids.extend(memory)
    yield message


def repeats_ids(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    yield message
    if message.HasField("chunk") and not memory:
        memory.append(1)
        yield message


def drops_a_chunk(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    memory.append(1)
    if message.HasField("complete") or len(memory) % 30 != 20:
        yield message


def no_complete(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    if message.HasField("chunk"):
        yield message


def ends_twice(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    yield message
    if message.HasField("complete"):
        yield message


def counts_per_chunk(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    if message.HasField("chunk"):
        message.chunk.completion_tokens = len(message.chunk.token_ids)
    yield message


def counts_the_prompt(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    part = _of(message)
    part.prompt_tokens += part.completion_tokens
    yield message


def unsorted_rows(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    for row in _of(message).output_logprobs.top_logprobs:
        values, ids = list(row.values)[::-1], list(row.token_ids)[::-1]
        row.values[:], row.token_ids[:] = values, ids
    yield message


def logprobs_of_the_last(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    """E6: the fault of a servicer in the wild."""
    if message.HasField("complete"):
        rows = message.complete.output_logprobs
        for field in (rows.token_logprobs, rows.token_ids, rows.top_logprobs):
            del field[:-1]
    yield message


def logprobs_again(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    if message.HasField("complete"):
        message.complete.output_logprobs.token_logprobs.append(-1.0)
    yield message


def positive_logprobs(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    for row in _of(message).output_logprobs.top_logprobs:
        row.values[:] = [1.0, *row.values[1:]]
    yield message


def eos_reason(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    if message.complete.finish_reason == "stop":
        message.complete.finish_reason = "eos"
    yield message


def no_match(message: pb.GenerateResponse, memory: list[int]) -> Iterator[pb.GenerateResponse]:
    message.complete.ClearField("matched_stop_token_id") if message.HasField("complete") else None
    yield message


def large_messages(
    message: pb.GenerateResponse, memory: list[int]
) -> Iterator[pb.GenerateResponse]:
    """What a limit-less servicer sends when its engine is quick."""
    if message.HasField("chunk") and message.chunk.output_logprobs.top_logprobs and not memory:
        memory.append(1)
        message.chunk.output_logprobs.top_logprobs[0].values.extend([-9.0] * 1_100_000)
    yield message


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

        await super().Generate(request, Writing(context, spoil))


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

        await asyncio.shield(
            asyncio.ensure_future(super().Generate(request, Deaf(context, lambda m, _: iter(()))))
        )


class NamesNoField(MlxEngineServicer):
    async def Generate(self, request: Any, context: Any) -> None:
        class Vague(Writing):
            async def abort(self, code: Any, details: str, trailers: Any = ()) -> None:
                await self._context.abort(code, "bad request", trailers)

        await super().Generate(request, Vague(context, lambda m, _: iter((m,))))


class SaysInternal(MlxEngineServicer):
    async def Generate(self, request: Any, context: Any) -> None:
        class Blunt(Writing):
            async def abort(self, code: Any, details: str, trailers: Any = ()) -> None:
                await self._context.abort(grpc.StatusCode.INTERNAL, details, trailers)

        await super().Generate(request, Blunt(context, lambda m, _: iter((m,))))


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
        status = self.status(request.service)
        await context.write(health_pb2.HealthCheckResponse(status=status))


class KnowsEveryName(health_pb2_grpc.HealthServicer):  # type: ignore[misc] # untyped base
    def __init__(self, board: StatusBoard, names: list[str]) -> None:
        pass

    async def Check(self, request: Any, context: Any) -> Any:
        return health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)


class SlowToTell(HealthServicer):
    async def Check(self, request: Any, context: Any) -> Any:
        await asyncio.sleep(1.2)
        return await super().Check(request, context)
