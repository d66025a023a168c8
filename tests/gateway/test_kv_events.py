"""The real router reads our KV events: a prompt goes to the worker that has its blocks."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
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
from smg_grpc_servicer.mlx import demo
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from smg_grpc_servicer.vllm.servicer import VllmServicerBase
from tests.support.kv_publisher import payload
from tests.support.kv_served import of
from tests.support.mlx_client import tokenizer
from tests.support.router import Router, routing
from tests.support.wait import until
from tests.support.zmq_publisher import ZmqPublisher

SIZE = 16
WORDS = ("one two three four five six seven", "alpha beta gamma delta epsilon zeta eta")


class Servicer(VllmServicerBase):
    """vLLM's proto over the fake engine, with events of a publisher."""

    def __init__(self, engine: FakeEngine, board: StatusBoard, events: KvEventService) -> None:
        super().__init__(engine, board)
        self.events = events
        self.served = 0
        self.cursors: list[int] = []

    async def Generate(self, request: Any, context: Any) -> None:
        self.served += 1
        await super().Generate(request, context)

    async def SubscribeKvEvents(self, request: Any, context: Any) -> None:
        self.cursors.append(request.start_sequence_number)
        await self.events.subscribe(request, context)


@dataclass
class Worker:
    """One of two that only differ in what they have cached."""

    publisher: ZmqPublisher
    servicer: Servicer
    address: str

    def holds(self, text: str, first_hash: int) -> None:
        """Publish the blocks of a prompt."""
        tokens = list(tokenizer().encode(text).ids)
        parent = None
        for at in range(len(tokens) // SIZE):
            block = {
                "type": "BlockStored",
                "block_hashes": [first_hash + at],
                "parent_block_hash": parent,
                "token_ids": tokens[at * SIZE : (at + 1) * SIZE],
                "block_size": SIZE,
                "medium": "GPU",
            }
            self.publisher.publish(payload(block, ts=first_hash + at))
            parent = first_hash + at

    async def subscribed(self) -> None:
        await until(lambda: self.servicer.events.statistics()["subscribers"] == 1, 20)


@asynccontextmanager
async def working() -> AsyncIterator[Worker]:
    publisher = ZmqPublisher()
    relay = Relay([of(publisher)])
    relay.start()
    board, engine = StatusBoard(), FakeEngine(tokenizer=str(demo.path()))
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


async def goes_to(router: Router, model: str, text: str, workers: list[Worker]) -> int:
    """Which worker answers a prompt."""
    before = [worker.servicer.served for worker in workers]
    answer = await router.post("/v1/completions", model=model, prompt=text, max_tokens=2)
    assert answer.status == 200, answer.text
    after = [worker.servicer.served for worker in workers]
    (chosen,) = [at for at in range(len(workers)) if after[at] > before[at]]
    return chosen


async def always_to(
    router: Router, model: str, text: str, workers: list[Worker], wanted: int
) -> None:
    """Once the router has applied what was published, every time."""
    end = monotonic() + 20
    row = 0
    while row < 6:
        row = row + 1 if await goes_to(router, model, text, workers) == wanted else 0
        assert monotonic() < end, router.log


async def test_a_prompt_goes_to_the_worker_that_has_its_blocks(tmp_path: Path) -> None:
    """J1: by the past, by live events, and by what a restarted publisher says."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(working()) for _ in range(2)]
        texts = [" ".join([words] * 12) for words in WORDS]
        workers[1].holds(texts[0], 1000)
        options = ("--policy", "cache_aware")
        router = await stack.enter_async_context(
            routing(tmp_path, *(w.address for w in workers), options=options)
        )
        model = workers[0].servicer.engine.model_facts().served_model_name
        await router.serves(model)
        for worker in workers:
            await worker.subscribed()
        await always_to(router, model, texts[0], workers, 1)
        workers[0].holds(texts[1], 2000)
        await always_to(router, model, texts[1], workers, 0)
        await asyncio.sleep(0)
        assert all(set(worker.servicer.cursors) == {0} for worker in workers)
