"""Workers that come late, go in order, or die: what the router's clients notice of it."""

from __future__ import annotations

import asyncio
import signal
from contextlib import AsyncExitStack
from pathlib import Path

from smg_grpc_servicer.mlx import demo
from tests.gateway.conftest import NAME
from tests.gateway.test_openai import GREEDY, chat, ends
from tests.support.mlx_client import connected
from tests.support.router import free_ports, routing
from tests.support.servers import MLX_SERVICE, serving, started

EXAMPLE = demo.examples()[0]
WORKER = ("--model", "demo", "--served-model-name", NAME)


async def test_a_router_waits_for_a_worker_that_comes_later(tmp_path: Path) -> None:
    """G6: while the worker loads it must not be taken for ready, and afterwards be found."""
    (port,) = free_ports(1)
    often = ("--worker-startup-check-interval", "1")
    async with routing(tmp_path, f"127.0.0.1:{port}", options=often) as router:
        await router.printed(r"(?i)listening|started|starting")
        async with started("--port", str(port), *WORKER) as worker:
            await worker.ready(MLX_SERVICE)
            await router.serves(NAME)
            answer = await chat(router, EXAMPLE.question)
            assert answer.json["choices"][0]["message"]["content"] == EXAMPLE.answer
            assert await router.models() == [NAME]


async def test_sigterm_lets_a_stream_of_the_router_end_well(tmp_path: Path) -> None:
    """B1: the rollout of a worker costs the running stream nothing."""
    async with AsyncExitStack() as stack:
        worker = await stack.enter_async_context(serving(*WORKER, "--drain-seconds", "60"))
        router = await stack.enter_async_context(routing(tmp_path, worker.address))
        await router.serves(NAME)
        client = await stack.enter_async_context(connected(worker.address))
        body = {**GREEDY, "prompt": "a b c", "max_tokens": 1500, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        stream = await router.begin("/v1/completions", **body)
        assert await client.active() == 1
        stopping = asyncio.ensure_future(worker.stop(60))
        answer = await stream.rest()
        assert await stopping == 0
        assert answer.status == 200
        assert ends(answer) == ["length"]
        assert answer.events[-1]["usage"]["completion_tokens"] == 1500
        assert answer.done


async def test_a_second_worker_takes_over(tmp_path: Path) -> None:
    """O2: one of two workers is killed; every request after that is answered by the other."""
    async with AsyncExitStack() as stack:
        workers = [await stack.enter_async_context(serving(*WORKER)) for _ in range(2)]
        router = await stack.enter_async_context(
            routing(tmp_path, *(w.address for w in workers), options=("--policy", "round_robin"))
        )
        await router.serves(NAME)
        clients = [await stack.enter_async_context(connected(w.address)) for w in workers]
        body = {**GREEDY, "prompt": "a b c", "max_tokens": 1500, "ignore_eos": True}
        body["stream_options"] = {"include_usage": True}
        streams = [await router.begin("/v1/completions", **body) for _ in clients]
        assert [await client.active() for client in clients] == [1, 1]
        workers[0].signal(signal.SIGKILL)
        assert await workers[0].exit_code() == -signal.SIGKILL
        for _ in range(6):
            answer = await chat(router, EXAMPLE.question)
            assert answer.status == 200, answer.text
            assert answer.json["choices"][0]["message"]["content"] == EXAMPLE.answer
        answers = [await stream.rest() for stream in streams]
        (whole,) = [answer for answer in answers if ends(answer) == ["length"]]
        (broken,) = [answer for answer in answers if answer is not whole]
        assert any("error" in event for event in broken.events)
        assert whole.events[-1]["usage"]["completion_tokens"] == 1500
        assert await clients[1].until_active(0) < 3
