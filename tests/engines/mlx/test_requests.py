"""The life of requests at the served engine: ids, abort, cancel, deadline, queue bound."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from time import monotonic
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import History, check
from tests.support.mlx_client import Client, connected, random_prompt
from tests.support.servers import Server, serving

ENDLESS: dict[str, Any] = {"max_tokens": 400}
CANCELS = 300


async def test_a_duplicate_id_is_refused_and_the_first_unharmed(noise_client: Client) -> None:
    """P5: ALREADY_EXISTS while the first runs; the first stream is whole; then the id is free."""
    prompt = random_prompt(8, seed=60)
    alone = await noise_client.ids(prompt, max_tokens=150)
    request = noise_client.request(prompt, request_id="twin", max_tokens=150)
    first = asyncio.ensure_future(noise_client.send(request))
    await noise_client.until_active(1)
    second = await noise_client.generate([9, 9], request_id="twin", max_tokens=5)
    assert second.code is grpc.StatusCode.ALREADY_EXISTS
    assert "twin" in second.details
    history = await first
    assert check(history) == []
    assert history.streamed_ids() == alone
    assert (await noise_client.send(request)).streamed_ids() == alone


async def test_an_id_can_be_used_again_at_once(noise_client: Client) -> None:
    """P5: late cleaning up after a request never cuts the next one under its id."""
    prompt = random_prompt(3, seed=61)
    for _ in range(50):
        history = await noise_client.generate(prompt, request_id="again", max_tokens=3)
        assert check(history) == []
        assert len(history.streamed_ids()) == 3


async def test_an_id_can_be_used_again_after_its_cancel(noise_client: Client) -> None:
    """P5: the same after a cancel and after an abort, whose clean-up is the slow one."""
    prompt = random_prompt(3, seed=62)
    for turn in range(20):
        call, begun = await noise_client.begin(prompt, request_id="reused", **ENDLESS)
        if turn % 2:
            call.cancel()
            await noise_client.until_active(0)
        else:
            await noise_client.stub.Abort(noise_client.pb.AbortRequest(request_ids=["reused"]))
            assert check(await begun.record(call)) == []
            assert begun.complete().finish_reason == "abort"
        history = await noise_client.generate(prompt, request_id="reused", max_tokens=4)
        assert check(history) == []
        assert history.complete().finish_reason == "length"


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_ends_with_a_complete(noise_client: Client, stream: bool) -> None:
    """C4: OK with finish_reason abort and what there was, within a moment; others go on."""
    prompts = [random_prompt(8, seed=63), random_prompt(9, seed=63)]
    alone = await noise_client.ids(prompts[1], max_tokens=150)
    aborted = noise_client.request(prompts[0], request_id="gone", stream=stream, **ENDLESS)
    neighbour = asyncio.ensure_future(
        noise_client.generate(prompts[1], request_id="gone-10", max_tokens=150)
    )
    running = asyncio.ensure_future(noise_client.send(aborted))
    await noise_client.until_active(2)
    start = monotonic()
    await noise_client.stub.Abort(noise_client.pb.AbortRequest(request_ids=["gone", "unknown"]))
    history = await running
    assert monotonic() - start < 1
    assert check(history) == []
    assert history.complete().finish_reason == "abort"
    assert len(history.complete().output_ids) < 400
    assert (await neighbour).streamed_ids() == alone


async def test_abort_of_nothing_is_fine(noise_client: Client) -> None:
    pb = noise_client.pb
    for ids in ([], [""], ["never-seen"]):
        await noise_client.stub.Abort(pb.AbortRequest(request_ids=ids))


async def test_an_abort_long_gone_does_not_meet_a_later_request(noise_client: Client) -> None:
    """P5: an abort before its request is no trap for it."""
    await noise_client.stub.Abort(noise_client.pb.AbortRequest(request_ids=["early"]))
    history = await noise_client.generate([5, 6], request_id="early", max_tokens=5)
    assert check(history) == []
    assert history.complete().finish_reason == "length"


async def test_cancels_at_any_moment_leave_nothing(
    noise_client: Client, noise_server: Server
) -> None:
    """C2, C3: whenever clients go, nothing runs on and memory stays where it was."""
    dice = random.Random(1)
    before = 0

    async def visit(number: int) -> None:
        prompt = random_prompt(dice.choice([1, 5, 60, 300]), seed=number)
        call = noise_client.stub.Generate(
            noise_client.request(prompt, stream=dice.random() < 0.7, **ENDLESS)
        )
        reader = asyncio.ensure_future(call.read())
        await asyncio.wait([reader], timeout=dice.choice([0, 0.001, 0.01, 0.1]))
        call.cancel()
        await asyncio.wait([reader])
        assert reader.cancelled() or reader.exception() is None or call.cancelled()

    for batch in range(CANCELS // 20):
        await asyncio.gather(*(visit(100 + batch * 20 + i) for i in range(20)))
        if batch == 4:
            await noise_client.until_active(0)
            before = noise_server.memory()
    await noise_client.until_active(0)
    assert noise_server.memory() - before < 96 * 2**20
    assert check(await noise_client.generate([5], max_tokens=3)) == []


async def test_a_deadline_ends_the_request(noise_client: Client) -> None:
    """C3: DEADLINE_EXCEEDED for the caller, and the engine is free at once."""
    call = noise_client.stub.Generate(
        noise_client.request(random_prompt(8, seed=64), **ENDLESS), timeout=0.15
    )
    history = await History().record(call)
    assert history.code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert history.completes == []
    assert await noise_client.until_active(0) < 1


async def test_a_reader_that_does_not_read_costs_little(
    noise_client: Client, noise_server: Server
) -> None:
    """C6: 32 unread streams of 450 ids: the server holds ids, not rows, and loses none."""
    prompts = [[3 + i, 4, 5] for i in range(32)]
    read = await noise_client.together([noise_client.request(p, max_tokens=450) for p in prompts])
    before = noise_server.memory()
    begun = [await noise_client.begin(p, max_tokens=450) for p in prompts]
    await noise_client.until_active(0, 30)
    assert noise_server.memory() - before < 32 * 2**20
    for (call, history), other in zip(begun, read, strict=True):
        assert check(await history.record(call)) == []
        assert history.streamed_ids() == other.streamed_ids()
        assert len(history.streamed_ids()) == 450


@pytest.fixture(scope="module")
async def narrow(one_loop: None) -> AsyncIterator[Client]:
    """One place, one waiting request."""
    async with (
        serving(
            "--model", "demo", "--max-queued-requests", "1", "--completion-batch-size", "1"
        ) as server,
        connected(server.address) as client,
    ):
        yield client


async def test_past_the_queue_bound_is_exhausted(narrow: Client) -> None:
    """P11: RESOURCE_EXHAUSTED past the bound, naming its flag; who was let in is served."""
    call, begun = await narrow.begin(random_prompt(4), max_tokens=1500)
    running = asyncio.ensure_future(begun.record(call))
    waiting: list[asyncio.Future[History]] = []
    refused: list[History] = []
    while not refused:
        attempt = asyncio.ensure_future(narrow.generate(random_prompt(5), max_tokens=3))
        await asyncio.wait([attempt], timeout=0.2)
        if attempt.done() and attempt.result().code is not grpc.StatusCode.OK:
            refused.append(attempt.result())
        else:
            waiting.append(attempt)
        assert len(waiting) <= 2
    assert refused[0].code is grpc.StatusCode.RESOURCE_EXHAUSTED
    assert "--max-queued-requests" in refused[0].details
    for history in await asyncio.gather(running, *waiting):
        assert check(history) == []
    assert check(await narrow.generate([5], max_tokens=3)) == []


async def test_abort_and_deadline_of_a_waiting_request(narrow: Client) -> None:
    """A request that waits for its place ends as one that runs, and gives the place free."""
    call, running = await narrow.begin(random_prompt(6), max_tokens=1500)
    waiting = asyncio.ensure_future(
        narrow.generate(random_prompt(7), request_id="waits", stream=False, max_tokens=5)
    )
    await narrow.until_active(2)
    await narrow.stub.Abort(narrow.pb.AbortRequest(request_ids=["waits"]))
    aborted = await waiting
    assert check(aborted) == []
    assert aborted.complete().finish_reason == "abort"
    assert list(aborted.complete().output_ids) == []

    late = History(code=grpc.StatusCode.RESOURCE_EXHAUSTED)
    while late.code is grpc.StatusCode.RESOURCE_EXHAUSTED:  # until the aborted one has left
        request = narrow.request(random_prompt(8), max_tokens=5)
        late = await History().record(narrow.stub.Generate(request, timeout=0.1))
    assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
    await narrow.until_active(1)
    assert check(await running.record(call)) == []
    assert len(running.streamed_ids()) == 1500
    await narrow.until_active(0)
