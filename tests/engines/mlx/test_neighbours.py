"""What a running stream feels of others: next to nothing. Gaps are judged by its own pace."""

from __future__ import annotations

import asyncio
from statistics import median
from time import monotonic

import pytest

from smg_grpc_servicer.testing.history import History, check
from tests.support.mlx_client import Client


def gaps(history: History) -> list[float]:
    """Seconds between messages."""
    return [b - a for a, b in zip(history.times, history.times[1:], strict=False)]


async def _watched(client: Client) -> tuple[History, asyncio.Task[History]]:
    """A long stream that has begun, and the task that reads it to its end."""
    history = History()
    call = client.stub.Generate(client.request([3, 4, 5], max_tokens=1500))
    task = asyncio.ensure_future(history.record(call))
    while len(history.messages) < 30 and not task.done():
        await asyncio.wait([task], timeout=0.01)
    return history, task


async def test_a_long_prompt_does_not_stop_a_running_stream(demo_client: Client) -> None:
    """P7: a 2,000-token prompt is admitted in pieces; whole, it would last a hundred steps."""
    start = monotonic()
    prompt = [7 + i % 900 for i in range(2000)]
    await demo_client.generate(prompt, max_tokens=1)
    cold = monotonic() - start
    history, running = await _watched(demo_client)
    before = len(history.messages)
    other = [8 + i % 899 for i in range(2000)]
    admitted = await demo_client.generate(other, max_tokens=1)
    during = gaps(history)[before:]
    assert check(admitted) == []
    assert check(await running) == []
    assert len(during) >= 5
    assert max(during) < max(0.6 * cold, 20 * median(gaps(history)))


async def test_short_prompts_pass_a_long_one(demo_client: Client) -> None:
    """P7: ten tokens sent together with two thousand do not wait for them."""
    long = asyncio.ensure_future(
        demo_client.generate([9 + i % 898 for i in range(2000)], max_tokens=1)
    )
    short = [
        asyncio.ensure_future(demo_client.generate([11 + i] * 10, max_tokens=1)) for i in range(4)
    ]
    start = monotonic()
    for history in await asyncio.gather(*short):
        assert check(history) == []
    took = monotonic() - start
    assert check(await long) == []
    assert took < monotonic() - start


@pytest.mark.parametrize("top_p", [1.0, 0.9])
async def test_a_new_temperature_stops_nobody(demo_client: Client, top_p: float) -> None:
    """P6: nothing is compiled for a temperature that was never seen before.

    Each of the six would make a gap of a second; a busy machine makes one or two of its own.
    """
    history, running = await _watched(demo_client)
    before = len(history.messages)
    for i in range(6):
        temperature = 0.511 + 0.0137 * i + top_p / 1000
        sampled = await demo_client.generate(
            [5, 6, 7], temperature=temperature, top_p=top_p, max_tokens=3
        )
        assert check(sampled) == []
    during = gaps(history)[before:]
    assert not running.done()
    assert sorted(during)[-3] < max(0.35, 30 * median(gaps(history)))
    running.cancel()
    await asyncio.wait([running])
    await demo_client.until_active(0)
