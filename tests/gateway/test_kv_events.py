"""The real router reads our KV events: a prompt goes to the worker that has its blocks."""

from __future__ import annotations

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
from tests.support.kv_publisher import cleared, payload
from tests.support.kv_served import of
from tests.support.mlx_client import tokenizer
from tests.support.router import Router, routing
from tests.support.wait import until
from tests.support.zmq_publisher import ZmqPublisher

SIZE = 16
TEXTS = [" ".join([f"{word} {word}s and {word}"] * 24) for word in ("red", "oak", "sea", "sun")]


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


@asynccontextmanager
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[Router, str, list[Worker]]]:
    """Two workers behind a router that has subscribed to both; the model's name."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(working()) for _ in range(2)]
        router = await stack.enter_async_context(
            routing(tmp_path, *(w.address for w in workers), options=("--policy", "cache_aware"))
        )
        model = workers[0].servicer.engine.model_facts().served_model_name
        await router.serves(model)
        for worker in workers:
            await worker.subscribed()
        yield router, model, workers


async def test_a_prompt_goes_to_the_worker_that_has_its_blocks(tmp_path: Path) -> None:
    """And follows its blocks to another worker, which no memory of past requests would do."""
    async with cluster(tmp_path) as (router, model, workers):
        for at, text in enumerate(TEXTS):
            workers[at % 2].holds(text, 1000 * (at + 1))
        for at, text in enumerate(TEXTS):
            await always_to(router, model, text, workers, at % 2)
        workers[0].publisher.publish(payload(cleared(), ts=7.0))
        workers[1].holds(TEXTS[0], 9000)
        await always_to(router, model, TEXTS[0], workers, 1)
        # Nobody had to begin anew for it.
        assert [worker.servicer.cursors for worker in workers] == [[0], [0]]


async def test_a_restarted_publisher_is_resynced(tmp_path: Path) -> None:
    """D: DATA_LOSS makes the router forget the old process and read the new one from its start."""
    async with cluster(tmp_path) as (router, model, workers):
        workers[0].holds(TEXTS[0], 1000)
        await always_to(router, model, TEXTS[0], workers, 0)
        old = workers[0].publisher
        old.close()
        new = ZmqPublisher(old.endpoint, replay_endpoint=str(old.replay_endpoint))
        try:
            workers[0] = Worker(new, workers[0].servicer, workers[0].address)
            workers[0].holds(TEXTS[1], 2000)
            workers[1].holds(TEXTS[0], 3000)
            await always_to(router, model, TEXTS[1], workers, 0)
            await always_to(router, model, TEXTS[0], workers, 1)
            assert workers[0].servicer.cursors == [0, 0]
        finally:
            new.close()


async def test_a_lost_batch_costs_one_resync(tmp_path: Path) -> None:
    """No endless loop of losses: the router subscribes once more and goes on."""
    async with cluster(tmp_path) as (router, model, workers):
        workers[0].holds(TEXTS[0], 1000)
        await always_to(router, model, TEXTS[0], workers, 0)
        workers[0].publisher.publish(b"\xc1")
        workers[0].holds(TEXTS[2], 2000)
        await always_to(router, model, TEXTS[2], workers, 0)
        assert workers[0].servicer.cursors == [0, 0]
