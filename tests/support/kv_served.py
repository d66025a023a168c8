"""A relay and its subscriptions on a real gRPC server, for one block."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
import zmq
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2_grpc

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.kv_events.endpoints import Source, source
from smg_grpc_servicer.kv_events.relay import Relay
from smg_grpc_servicer.kv_events.sampler import LoadSampler
from smg_grpc_servicer.kv_events.service import KvEventService
from tests.support.kv_publisher import Index
from tests.support.zmq_publisher import ZmqPublisher


class Servicer(vllm_engine_pb2_grpc.VllmEngineServicer):
    """Only the one RPC."""

    def __init__(self, service: KvEventService) -> None:
        self._service = service

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        await self._service.subscribe(request, context)


@dataclass
class Subscription:
    """A client's call, read on demand."""

    call: Any
    indexes: defaultdict[int, Index] = field(default_factory=lambda: defaultdict(Index))
    """By rank."""
    batches: list[common_pb2.KvEventBatch] = field(default_factory=list)
    loads: list[common_pb2.KvEventBatch] = field(default_factory=list)

    @property
    def index(self) -> Index:
        return self.indexes[0]

    def _apply(self, batch: common_pb2.KvEventBatch) -> None:
        self.indexes[batch.dp_rank].apply(batch)

    async def read(self, batches: int = 1) -> list[common_pb2.KvEventBatch]:
        """That many batches with events or snapshots; load records are put aside."""
        found: list[common_pb2.KvEventBatch] = []
        while len(found) < batches:
            batch = await self.call.read()
            assert batch is not grpc.aio.EOF, await self.call.code()
            self._apply(batch)
            if batch.load.load_only:
                self.loads.append(batch)
            else:
                found.append(batch)
        self.batches += found
        return found

    async def read_load(self) -> common_pb2.KvEventBatch:
        """The next load record that comes by itself."""
        while True:
            batch = await self.call.read()
            assert batch is not grpc.aio.EOF, await self.call.code()
            if batch.load.load_only:
                return batch  # type: ignore[no-any-return]
            self._apply(batch)

    async def running(self, wanted: bool) -> common_pb2.EngineLoad:
        """The first load record that says whether requests run."""
        while True:
            load = (await self.read_load()).load
            if bool(load.running_requests) is wanted:
                return load

    async def learn(self, hashes: Sequence[int]) -> None:
        """Until all these blocks are in the index."""
        while not {block_hash for _, block_hash in self.index.blocks} >= set(hashes):
            await self.read()

    def stored(self) -> list[Any]:
        """Every block that was told."""
        return [
            block
            for batch in self.batches
            for event in batch.events
            for block in event.stored.blocks
        ]

    async def end(self) -> tuple[grpc.StatusCode, str]:
        """Read to the end; the status."""
        try:
            while (batch := await self.call.read()) is not grpc.aio.EOF:
                self._apply(batch)
                self.batches.append(batch)
        except grpc.aio.AioRpcError as error:
            return error.code(), str(error.details())
        return await self.call.code(), ""


@asynccontextmanager
async def subscribed(stub: Any, cursor: int = 0) -> AsyncIterator[Subscription]:
    """To a server of its own; load records come at once."""
    request = common_pb2.SubscribeKvEventsRequest(
        start_sequence_number=cursor, load_records_before_first_batch=True
    )
    subscription = Subscription(stub.SubscribeKvEvents(request, timeout=60))
    try:
        yield subscription
    finally:
        subscription.call.cancel()


@dataclass
class KvServed:
    """What a test talks to."""

    relay: Relay
    service: KvEventService
    board: StatusBoard
    stub: Any

    def subscribe(self, cursor: int = 0, *, early_loads: bool = False) -> Subscription:
        request = common_pb2.SubscribeKvEventsRequest(
            start_sequence_number=cursor, load_records_before_first_batch=early_loads
        )
        return Subscription(self.stub.SubscribeKvEvents(request, timeout=30))


def of(publisher: ZmqPublisher, rank: int = 0) -> Source:
    return source(rank, publisher.endpoint, publisher.replay_endpoint, resolved=True, binds=True)


@asynccontextmanager
async def kv_served(
    sources: Sequence[Source], *, loads: LoadSampler | None = None, **options: Any
) -> AsyncIterator[KvServed]:
    """Everything is idle again at the end, or the test fails."""
    with zmq.Context() as context:
        relay = Relay(sources, context=context, **options)
        relay.start()
        board = StatusBoard()
        board.serving()
        service = KvEventService(relay, board, loads=loads)
        server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(Servicer(service), server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        try:
            async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
                yield KvServed(relay, service, board, vllm_engine_pb2_grpc.VllmEngineStub(channel))
        finally:
            board.stopped()
            await server.stop(1)
            await service.close()
    left = {n: v for n, v in service.statistics().items() if v and not n.endswith("_total")}
    assert not left
