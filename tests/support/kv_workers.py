"""A worker without a model behind the real router: it answers, and says what it has cached."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.kv_events.loads import Activity
from smg_grpc_servicer.kv_events.relay import Relay
from smg_grpc_servicer.kv_events.sampler import LoadSampler
from smg_grpc_servicer.kv_events.service import KvEventService
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from smg_grpc_servicer.vllm.servicer import VllmServicerBase
from tests.support.kv_publisher import payload
from tests.support.kv_served import of
from tests.support.router import Router
from tests.support.wait import until
from tests.support.zmq_publisher import ZmqPublisher


class Servicer(VllmServicerBase):
    """vLLM's proto over the fake engine, with events of a publisher."""

    def __init__(self, engine: FakeEngine, board: StatusBoard, events: KvEventService) -> None:
        super().__init__(engine, board)
        self.events = events
        self.served = 0
        self.cursors: list[int] = []
        """Of each subscription, as it began."""

    async def Generate(self, request: Any, context: Any) -> None:
        self.served += 1
        await super().Generate(request, context)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        self.cursors.append(request.start_sequence_number)
        await self.events.subscribe(request, context)


@dataclass
class Worker:
    """One of several that only differ in what they have cached."""

    publisher: ZmqPublisher
    servicer: Servicer
    address: str

    def holds(self, tokens: Sequence[int], size: int, first_hash: int) -> None:
        """Publish the whole blocks of a prompt."""
        parent = None
        for at in range(len(tokens) // size):
            block = {
                "type": "BlockStored",
                "block_hashes": [first_hash + at],
                "parent_block_hash": parent,
                "token_ids": list(tokens[at * size : (at + 1) * size]),
                "block_size": size,
                "medium": "GPU",
            }
            self.publisher.publish(payload(block, ts=first_hash + at))
            parent = first_hash + at

    async def subscribed(self) -> None:
        await until(lambda: self.servicer.events.statistics()["subscribers"] == 1, 20)


@asynccontextmanager
async def working(tokenizer: Path, **facts: Any) -> AsyncIterator[Worker]:
    """:param facts: of the model, where they matter."""
    publisher = ZmqPublisher()
    relay = Relay([of(publisher)])
    relay.start()
    board, engine = StatusBoard(), FakeEngine(tokenizer=str(tokenizer))
    engine.facts = replace(engine.facts, **facts)
    events = KvEventService(relay, board, loads=LoadSampler(engine.loads, Activity))
    servicer = Servicer(engine, board, events)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    await engine.start()
    board.serving()
    try:
        yield Worker(publisher, servicer, f"127.0.0.1:{port}")
    finally:
        board.stopped()
        await server.stop(1)
        await engine.close()
        await events.close()
        publisher.close()


@dataclass(frozen=True)
class Front:
    """A router over a worker that is looked at by a test, and this one."""

    router: Router
    model: str
    other: Worker

    async def goes_to_the_other(self, text: str) -> bool:
        before = self.other.servicer.served
        answer = await self.router.post(
            "/v1/completions", model=self.model, prompt=text, max_tokens=2, temperature=0
        )
        assert answer.status == 200, answer.text
        return self.other.servicer.served > before

    async def always(self, text: str, *, other: bool, seconds: float = 30.0) -> None:
        """Once the router has applied what was published, every time."""
        end, row = monotonic() + seconds, 0
        while row < 20:  # which chance does not make
            row = row + 1 if await self.goes_to_the_other(text) is other else 0
            assert monotonic() < end, self.router.log
