"""Tokens travel together while the loop lags, and only then."""

from __future__ import annotations

import asyncio
from time import monotonic

from smg_grpc_servicer.core.mailbox import Mailbox, Pulse
from smg_grpc_servicer.core.pace import LAG, LONGEST, SHORTEST, SMALL_SHARE, Pace
from smg_grpc_servicer.core.requests import RequestTable
from smg_grpc_servicer.core.types import Delta, Finish


def lagging(window: float = 0.05) -> Pulse:
    pulse = Pulse(longest_hold=window)
    pulse.pace.took(10.0)
    assert pulse.pace.window == window
    return pulse


def test_the_window_follows_the_lag_and_closes_with_it() -> None:
    pace = Pace()
    pace.took(LAG)
    assert pace.window == 0.0
    pace.took(2 * LAG)
    assert pace.window == SHORTEST
    pace.took(SHORTEST / 3)
    assert SHORTEST < pace.window < LONGEST
    pace.took(10.0)
    assert pace.window == LONGEST
    pace.took(LAG)
    assert pace.window == 0.0


def test_writing_takes_a_smaller_part_where_the_engine_computes() -> None:
    """On the same processors: a stream's messages are further apart for the same lag."""
    table = RequestTable()
    pace = table.admit("r", stream=True).mailbox._pulse.pace
    pace.took(LONGEST / SMALL_SHARE)
    assert pace.window == SHORTEST
    table.write_less()
    pace.took(LONGEST / SMALL_SHARE)
    assert pace.window == LONGEST


def test_a_part_of_the_writers_stands_for_all() -> None:
    pace = Pace()
    pace.took(LAG / 2, part=1.5)
    assert pace.window == 0.0
    pace.took(LAG / 2, part=4)
    assert pace.window > 0.0


def test_a_hold_of_zero_is_none() -> None:
    pace = Pace(longest=0.0)
    pace.took(10.0)
    assert pace.window == 0.0


async def test_a_round_of_writers_is_measured_to_its_end() -> None:
    """The lag is that of the last of them, whoever else was woken before."""
    pulse = Pulse()
    boxes = [Mailbox(stream=True, pulse=pulse) for _ in range(16)]
    for box in boxes:
        box.owe()

    async def write(box: Mailbox) -> None:
        assert await box.wait()
        busy = monotonic() + 2 * LAG
        while monotonic() < busy:
            pass
        assert box.take() is not None

    writers = [asyncio.ensure_future(write(box)) for box in boxes]
    await asyncio.sleep(0)
    for box in boxes:
        box.put(Delta(token_ids=[1]))
    await asyncio.gather(*writers)
    await asyncio.sleep(0)
    assert pulse.pace.window == LONGEST


async def test_first_tokens_and_ends_are_never_held() -> None:
    pulse = lagging()
    box = Mailbox(2, stream=True, pulse=pulse)
    for index in range(2):
        box.put(Delta(index, [1]))
        first = box.take()
        assert first is not None
        assert (first.index, first.token_ids) == (index, [1])
    box.put(Delta(0, [2]))
    assert box.take() is None
    box.put(Delta(0, [3], finish=Finish("stop")))
    last = box.take()
    assert last is not None
    assert last.token_ids == [2, 3]


async def test_what_is_held_comes_out_together_and_soon() -> None:
    pulse = lagging(0.05)
    boxes = [Mailbox(stream=True, pulse=pulse) for _ in range(3)]
    for box in boxes:
        box.put(Delta(token_ids=[1]))
        assert box.take() is not None
        for token in (2, 3):
            box.put_ids(0, [token])
        assert box.take() is None
        assert box.size == 2
    assert pulse.pace.statistics() == {"held": 3}
    start = monotonic()
    for box in boxes:
        assert await asyncio.wait_for(box.wait(), 1.0)
        delta = box.take()
        assert delta is not None
        assert delta.token_ids == [2, 3]
    assert monotonic() - start < 0.5
    assert pulse.pace.statistics() == {"held": 0}


async def test_an_end_does_not_wait_for_what_is_held() -> None:
    pulse = lagging(LONGEST)
    for end in (Mailbox.abort, lambda box: box.cut(RuntimeError("over"))):
        box = Mailbox(stream=True, pulse=pulse)
        box.put(Delta(token_ids=[1]))
        box.take()
        box.put(Delta(token_ids=[2]))
        end(box)
        assert box.ended
        assert box.size == 0
    assert pulse.pending == 0


async def test_an_answer_sent_whole_does_not_wait() -> None:
    box = Mailbox(stream=False, pulse=lagging())
    box.put(Delta(token_ids=[1]))
    box.put(Delta(token_ids=[2], finish=Finish("length")))
    assert await asyncio.wait_for(box.wait(), 1.0)
