"""The real router reads our KV events: a prompt goes to the worker that has its blocks."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from time import monotonic

from smg_grpc_servicer.mlx import demo
from tests.support.kv_publisher import cleared, payload
from tests.support.kv_workers import Worker, working
from tests.support.mlx_client import tokenizer
from tests.support.router import Router, routing
from tests.support.zmq_publisher import ZmqPublisher

SIZE = 16
TEXTS = [" ".join([f"{word} {word}s and {word}"] * 24) for word in ("red", "oak", "sea", "sun")]


def hold(worker: Worker, text: str, first_hash: int) -> None:
    worker.holds(tokenizer().encode(text).ids, SIZE, first_hash)


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
    while row < 20:  # which chance does not make
        row = row + 1 if await goes_to(router, model, text, workers) == wanted else 0
        assert monotonic() < end, router.log


@asynccontextmanager
async def cluster(tmp_path: Path) -> AsyncIterator[tuple[Router, str, list[Worker]]]:
    """Two workers behind a router that has subscribed to both; the model's name."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(working(demo.path())) for _ in range(2)]
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
            hold(workers[at % 2], text, 1000 * (at + 1))
        for at, text in enumerate(TEXTS):
            await always_to(router, model, text, workers, at % 2)
        workers[0].publisher.publish(payload(cleared(), ts=7.0))
        hold(workers[1], TEXTS[0], 9000)
        await always_to(router, model, TEXTS[0], workers, 1)
        # Nobody had to begin anew for it.
        assert [worker.servicer.cursors for worker in workers] == [[0], [0]]


async def test_a_restarted_publisher_is_resynced(tmp_path: Path) -> None:
    """D: DATA_LOSS makes the router forget the old process and read the new one from its start."""
    async with cluster(tmp_path) as (router, model, workers):
        hold(workers[0], TEXTS[0], 1000)
        await always_to(router, model, TEXTS[0], workers, 0)
        old = workers[0].publisher
        old.close()
        new = ZmqPublisher(old.endpoint, replay_endpoint=str(old.replay_endpoint))
        try:
            workers[0] = Worker(new, workers[0].servicer, workers[0].address)
            hold(workers[0], TEXTS[1], 2000)
            hold(workers[1], TEXTS[0], 3000)
            await always_to(router, model, TEXTS[1], workers, 0)
            await always_to(router, model, TEXTS[0], workers, 1)
            assert workers[0].servicer.cursors == [0, 0]
        finally:
            new.close()


async def test_a_lost_batch_costs_one_resync(tmp_path: Path) -> None:
    """No endless loop of losses: the router subscribes once more and goes on."""
    async with cluster(tmp_path) as (router, model, workers):
        hold(workers[0], TEXTS[0], 1000)
        await always_to(router, model, TEXTS[0], workers, 0)
        workers[0].publisher.publish(b"\xc1")
        hold(workers[0], TEXTS[2], 2000)
        await always_to(router, model, TEXTS[2], workers, 0)
        assert workers[0].servicer.cursors == [0, 0]
