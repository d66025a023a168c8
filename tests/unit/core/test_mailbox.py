from __future__ import annotations

import asyncio
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.core.errors import EngineDead, Exhausted
from smg_grpc_servicer.core.mailbox import Mailbox, Pulse
from smg_grpc_servicer.core.types import Delta, Finish, LogprobRows


def delta(*ids: int, index: int = 0, finish: str | None = None) -> Delta:
    return Delta(index, list(ids), finish=Finish(finish) if finish else None)


def drain(box: Mailbox) -> list[Delta]:
    out = []
    while (taken := box.take()) is not None:
        out.append(taken)
    return out


def test_what_piles_up_comes_out_as_one_delta() -> None:
    box = Mailbox(stream=True)
    for token in (1, 2, 3):
        box.put(delta(token))
    box.put(delta(finish="length"))

    (only,) = drain(box)

    assert only.token_ids == [1, 2, 3]
    assert only.finish == Finish("length")
    assert box.statistics() == {"pending": 0, "open": 0, "dropped": 0}


def test_choices_do_not_mix() -> None:
    box = Mailbox(2, stream=True)
    box.put(delta(1, index=1))
    box.put(delta(2, index=0))
    box.put(delta(3, index=1))

    assert [(d.index, d.token_ids) for d in drain(box)] == [(1, [1, 3]), (0, [2])]


def test_logprob_rows_stay_in_step_with_their_ids() -> None:
    box = Mailbox(stream=True)
    for token in (4, 5):
        one = delta(token)
        one.logprobs = LogprobRows([-0.1 * token], [[token]], [[-0.1 * token]])
        box.put(one)

    (only,) = drain(box)

    assert only.logprobs is not None
    assert only.logprobs.top_ids == [[4], [5]]
    assert len(only.logprobs) == len(only.token_ids)


async def test_an_answer_sent_whole_wakes_its_writer_once() -> None:
    box = Mailbox(stream=False)
    waiting = asyncio.ensure_future(box.wait())
    await asyncio.sleep(0)
    box.put(delta(1))
    await asyncio.sleep(0)
    assert not waiting.done()
    assert box.take() is None
    box.put(delta(2, finish="stop"))

    assert await waiting
    (only,) = drain(box)
    assert only.token_ids == [1, 2]
    assert not await box.wait()


async def test_listeners_are_called_once_a_turn_and_together() -> None:
    """What a step brings to all streams is one callback of the loop, and one message a stream."""
    pulse, called = Pulse(), list[int]()
    boxes = [Mailbox(stream=True, pulse=pulse) for _ in range(3)]
    for at, box in enumerate(boxes):
        box.listen(partial(called.append, at))
    assert called == [0, 1, 2], "there may have been something before"
    called.clear()
    for box in boxes:
        box.put(delta(1))
    for box in boxes:
        box.put(delta(2))
    assert called == []
    await asyncio.sleep(0)
    assert called == [0, 1, 2]
    assert [d.token_ids for box in boxes for d in drain(box)] == [[1, 2]] * 3

    called.clear()
    boxes[0].put(delta(3))
    boxes[0].close()
    boxes[1].fail(EngineDead("gone"))
    boxes[1].close()
    boxes[1].abort()
    await asyncio.sleep(0)
    assert called == [0, 1]


def test_a_put_without_a_loop_takes_nobody_along() -> None:
    """It is a fault of its engine; the streams of others are woken as ever."""
    pulse, called = Pulse(), list[str]()
    boxes = [Mailbox(stream=True, pulse=pulse) for _ in range(2)]
    boxes[0].listen(lambda: called.append("first"))
    boxes[1].listen(lambda: called.append("second"))
    with pytest.raises(RuntimeError, match="no running event loop"):
        boxes[0].put(delta(1))

    async def rightly() -> None:
        called.clear()
        boxes[1].put(delta(2))
        await asyncio.sleep(0)
        assert called == ["second"]

    asyncio.run(rightly())


async def test_it_is_over_when_the_last_end_was_taken() -> None:
    box = Mailbox(2, stream=True)
    box.put(delta(1, finish="stop"))
    box.put(delta(2, index=1, finish="stop"))
    assert box.ended
    seen = [(box.over, box.take() is not None) for _ in range(2)]
    assert seen == [(False, True), (False, True)]
    assert box.over
    box.check()


async def test_an_error_shows_once_all_before_it_was_taken() -> None:
    box = Mailbox(stream=True)
    box.put(delta(1))
    box.fail(EngineDead("gone"))
    box.check()
    assert box.take() is not None
    assert not box.over
    with pytest.raises(EngineDead):
        box.check()


async def test_an_error_comes_after_the_tokens_before_it() -> None:
    """O7: five tokens and a failure are five tokens and a status, never a quiet end."""
    box = Mailbox(stream=True)
    box.put(delta(1, 2, 3, 4, 5))
    box.fail(EngineDead("gone"))

    assert await box.wait()
    assert [d.token_ids for d in drain(box)] == [[1, 2, 3, 4, 5]]
    with pytest.raises(EngineDead, match="gone"):
        await box.wait()
    assert box.engine_done


async def test_a_cut_drops_what_waits_and_leaves_the_engine_to_be_told() -> None:
    box = Mailbox(stream=True)
    box.put(delta(1))
    box.cut(EngineDead("stop"))

    with pytest.raises(EngineDead):
        await box.wait()
    assert not box.engine_done


async def test_no_token_follows_an_abort() -> None:
    """C4: what a slow reader had not taken yet is dropped, in streams."""
    box = Mailbox(2, stream=True)
    box.put(delta(1, 2, index=0))

    assert box.abort()
    box.put(delta(3, index=0))

    assert [(d.index, d.token_ids, d.finish) for d in drain(box)] == [
        (0, [], Finish("abort")),
        (1, [], Finish("abort")),
    ]
    assert box.statistics() == {"pending": 0, "open": 0, "dropped": 1}
    assert not box.abort()
    assert not box.engine_done


async def test_an_aborted_whole_answer_keeps_what_it_has() -> None:
    box = Mailbox(stream=False)
    box.put(delta(1, 2))
    box.abort()

    (only,) = drain(box)

    assert only.token_ids == [1, 2]
    assert only.finish == Finish("abort")


async def test_memory_is_bounded_by_configuration_not_by_the_reader() -> None:
    box = Mailbox(stream=True, limit=10)
    for token in range(11):
        box.put(delta(token))

    with pytest.raises(Exhausted, match="read faster"):
        await box.wait()
    assert box.statistics()["pending"] == 0
    assert not box.engine_done


async def test_a_cancelled_writer_leaves_the_mailbox_usable() -> None:
    box = Mailbox(stream=True)
    waiting = asyncio.ensure_future(box.wait())
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    box.put(delta(1))

    assert await box.wait()


@given(st.lists(st.one_of(st.integers(0, 999), st.just("take")), max_size=60))
def test_every_token_comes_out_once_and_in_order(script: list[int | str]) -> None:
    box = Mailbox(stream=True)
    sent: list[int] = []
    seen: list[int] = []
    for step in script:
        if isinstance(step, int):
            box.put(delta(step))
            sent.append(step)
        elif (taken := box.take()) is not None:
            seen += taken.token_ids
    for rest in drain(box):
        seen += rest.token_ids

    assert seen == sent
    assert box.statistics()["pending"] == 0
