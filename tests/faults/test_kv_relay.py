"""KV events over real ZMQ sockets and real gRPC: nothing is lost without a word."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.core.errors import Unavailable
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.kv_events import older, relay
from smg_grpc_servicer.kv_events.endpoints import source
from smg_grpc_servicer.kv_events.loads import Activity
from smg_grpc_servicer.kv_events.sampler import LoadSampler
from tests.support.kv_publisher import payload, removed, stored
from tests.support.kv_served import KvServed, kv_served, of
from tests.support.wait import until
from tests.support.zmq_publisher import ZmqPublisher

Code = grpc.StatusCode


@contextmanager
def publishing(*args: Any, **knobs: Any) -> Iterator[ZmqPublisher]:
    publisher = ZmqPublisher(*args, **knobs)
    try:
        yield publisher
    finally:
        publisher.close()


def batch(block: int, ts: float = 1.0) -> bytes:
    return payload(stored([block]), ts=ts + block)


async def seen(served: KvServed, last: int, rank: int = 0) -> None:
    await until(lambda: served.relay.histories[rank].view().last == last)


async def test_what_was_published_before_the_relay_is_not_lost() -> None:
    """D: a replay endpoint brings back what came before anybody listened."""
    with publishing() as publisher:
        publisher.publish(*(batch(n) for n in range(3)))
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            first = await subscription.read(3)
            publisher.publish(batch(3))
            (live,) = await subscription.read()
    assert [b.sequence_number for b in [*first, live]] == [0, 1, 2, 3]
    assert [e.event_id for b in [*first, live] for e in b.events] == [1, 2, 3, 4]
    assert not any(b.HasField("snapshot") for b in first)
    assert live.dp_rank == 0


async def test_headers_come_at_once_on_a_quiet_engine() -> None:
    """The gateway gives up a subscription without headers after 2 s."""
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            started = monotonic()
            subscription = served.subscribe()
            await subscription.call.initial_metadata()
            assert monotonic() - started < 1.0
            subscription.call.cancel()


async def test_a_gap_is_filled_from_the_replay() -> None:
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            publisher.publish(batch(0))
            await seen(served, 0)
            publisher.publish(batch(1), batch(2), heard=False)
            publisher.publish(batch(3))
            assert [b.sequence_number for b in await subscription.read(4)] == [0, 1, 2, 3]
            assert served.service.statistics()["gaps_total"] == 1


async def test_older_replay_frames_are_understood() -> None:
    """TokenSpeed and older SGLang leave the topic out of a replay."""
    with publishing(legacy_frames=True, topic=b"kv") as publisher:
        publisher.publish(batch(0))
        async with kv_served([of(publisher)]) as served:
            assert (await served.subscribe().read())[0].sequence_number == 0


async def test_a_gap_without_replay_is_told_and_the_next_state_is_partial() -> None:
    """J1: DATA_LOSS, never silence; then a snapshot that says what it does not know."""
    with publishing(replay=False) as publisher:
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            await until(lambda: bool(_sent(served, publisher, 0)))
            await subscription.read()
            publisher.publish(batch(101), heard=False)
            publisher.publish(batch(102))
            code, details = await subscription.end()
            assert code is Code.DATA_LOSS
            assert "never arrived" in details

            again = served.subscribe()
            (snapshot,) = await again.read()
            assert snapshot.snapshot.unknown_before == publisher.sequence - 1
            assert snapshot.sequence_number == publisher.sequence - 1
            assert [e.WhichOneof("data") for e in snapshot.events] == ["cleared", "stored"]
            publisher.publish(batch(103))
            (live,) = await again.read()
            assert live.sequence_number == snapshot.sequence_number + 1


def _sent(served: KvServed, publisher: ZmqPublisher, rank: int) -> bool:
    """Publish until the relay hears it: a PUB socket drops what nobody has subscribed to yet."""
    if served.relay.histories[rank].view().last is None:
        publisher.publish(batch(publisher.sequence))
        return False
    return True


async def test_a_corrupt_payload_is_asked_for_again() -> None:
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            publisher.publish(batch(0))
            await seen(served, 0)
            publisher.publish(batch(1), live=b"\xc1not msgpack")
            assert [b.sequence_number for b in await subscription.read(2)] == [0, 1]


async def test_a_payload_that_stays_corrupt_is_a_loss() -> None:
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            publisher.publish(batch(0))
            await subscription.read()
            publisher.publish(b"\xc1not msgpack")
            code, details = await subscription.end()
            assert code is Code.DATA_LOSS
            assert "batch 1 cannot be decoded" in details


async def test_corrupt_payloads_without_end_do_not_loop() -> None:
    """The gateway resubscribes without delay, so one loss in a row may be told, not a hundred."""
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            publisher.publish(batch(0))
            await seen(served, 0)
            losses = 0
            for _ in range(50):
                publisher.publish(b"\xc1")
                subscription = served.subscribe()
                try:
                    code, _ = await asyncio.wait_for(subscription.end(), 0.05)
                    losses += code is Code.DATA_LOSS
                except asyncio.TimeoutError:
                    pass
                subscription.call.cancel()
            assert losses <= 3


async def test_a_restarted_publisher_that_is_already_past_our_place_is_noticed() -> None:
    """J2: numbers alone would read as a gap, and the new cache be built upon the old one."""
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            publisher.publish(batch(0), batch(1), batch(2))
            await subscription.read(3)
            publisher.close()
            with publishing(
                publisher.endpoint, replay_endpoint=str(publisher.replay_endpoint)
            ) as restarted:
                restarted.publish(*(batch(n, ts=500.0) for n in range(10, 15)))
                code, _ = await subscription.end()
                assert code is Code.DATA_LOSS
                again = served.subscribe()
                assert [b.sequence_number for b in await again.read(5)] == [0, 1, 2, 3, 4]
                assert {h for _, h in again.index.blocks} == {10, 11, 12, 13, 14}


async def test_a_cursor_continues_with_the_next_batch() -> None:
    with publishing() as publisher:
        publisher.publish(*(batch(n) for n in range(10)))
        async with kv_served([of(publisher)]) as served:
            await seen(served, 9)
            resumed = served.subscribe(7)
            assert [b.sequence_number for b in await resumed.read(2)] == [8, 9]
            level = served.subscribe(9)
            await level.call.initial_metadata()
            publisher.publish(batch(10))
            assert [b.sequence_number for b in await level.read()] == [10]


async def test_a_cursor_older_than_the_history_is_served_from_the_replay() -> None:
    with publishing() as publisher:
        publisher.publish(*(batch(n) for n in range(10)))
        async with kv_served([of(publisher)], batches=3) as served:
            await seen(served, 9)
            resumed = served.subscribe(2)
            read = await resumed.read(7)
            assert [b.sequence_number for b in read] == [3, 4, 5, 6, 7, 8, 9]
            assert [e.event_id for b in read for e in b.events] == [1, 2, 3, 4, 5, 6, 7]


@pytest.mark.parametrize("cursor", [2, 50])
async def test_a_cursor_that_nobody_can_serve_is_out_of_range_before_any_header(
    cursor: int,
) -> None:
    """J1: after headers the gateway would take it for an ordinary error and never resync."""
    with publishing(keep=5) as publisher:
        publisher.publish(*(batch(n) for n in range(20)))
        async with kv_served([of(publisher)], batches=3) as served:
            await seen(served, 19)
            subscription = served.subscribe(cursor)
            code, details = await subscription.end()
            assert code is Code.OUT_OF_RANGE
            assert f"got {cursor}" in details
            assert not subscription.batches
            assert not await subscription.call.initial_metadata()


async def test_a_silent_replay_endpoint_does_not_hold_the_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(older, "SECONDS", 0.3)
    with publishing(answers=False) as publisher:
        async with kv_served([of(publisher)]) as served:
            started = monotonic()
            code, _ = await served.subscribe(5).end()
            assert code is Code.OUT_OF_RANGE
            assert monotonic() - started < 1.5


async def test_a_replay_that_never_comes_ends_in_a_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unavailable for five seconds is unavailable; here a shorter while."""
    monkeypatch.setattr(relay, "REPLAY_SECONDS", 0.2)
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            publisher.publish(batch(0))
            await subscription.read()
            publisher.answers = False
            publisher.publish(batch(1), heard=False)
            publisher.publish(batch(2))
            code, details = await subscription.end()
            assert code is Code.DATA_LOSS
            assert "batches 1 to 1 never arrived and were not replayed" in details


async def test_a_tail_that_was_dropped_is_found_in_the_silence(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(relay, "PROBE_SECONDS", 0.1)
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            publisher.publish(batch(0))
            publisher.publish(batch(1), heard=False)
            assert [b.sequence_number for b in await subscription.read(2)] == [0, 1]


async def test_once_the_history_has_rolled_a_new_subscriber_gets_the_live_blocks() -> None:
    with publishing() as publisher:
        publisher.publish(*(batch(n) for n in range(1, 9)))
        publisher.publish(payload(removed([3])))
        async with kv_served([of(publisher)], batches=2) as served:
            await seen(served, 8)
            subscription = served.subscribe()
            (chunk,) = await subscription.read()
            assert chunk.sequence_number == 8
            assert chunk.snapshot.blocks == 7
            assert chunk.snapshot.unknown_before == 0
            assert {e.event_id for e in chunk.events} == {0}
            publisher.publish(batch(9))
            await subscription.read()
            assert {h for _, h in subscription.index.blocks} == {1, 2, 4, 5, 6, 7, 8, 9}


async def test_a_reader_that_stalls_is_brought_up_to_date_or_told() -> None:
    """J1: a slow reader and a flood: what it reads later makes a right index, or is a DATA_LOSS."""
    with publishing() as publisher:
        async with kv_served([of(publisher)], batches=20) as served:
            subscription = served.subscribe()
            publisher.publish(batch(0))
            await subscription.read()
            last = 0
            while served.service.statistics()["lag_batches"] <= 20:
                # More than fits into what gRPC and the kernel hold for a reader.
                for _ in range(50):
                    last += 1
                    publisher.publish(payload(*(stored([1000 * last + n]) for n in range(300))))
                await seen(served, last)
            truth = {0} | {1000 * at + n for at in range(1, last + 1) for n in range(300)}
            while subscription.index.cursor < last:
                await subscription.read()
            assert any(b.HasField("snapshot") for b in subscription.batches)
            assert {h for _, h in subscription.index.blocks} == truth
            subscription.call.cancel()


async def test_each_rank_keeps_its_own_numbers() -> None:
    with publishing() as zero, publishing() as one:
        zero.publish(*(batch(n) for n in range(3)))
        one.publish(batch(77))
        async with kv_served([of(zero, 0), of(one, 1)]) as served:
            await seen(served, 2)
            await seen(served, 0, rank=1)
            resumed = served.subscribe(1)
            read = [await resumed.call.read() for _ in range(2)]
    by_rank = {b.dp_rank: b for b in read}
    assert by_rank[0].sequence_number == 2
    # Nobody said what the subscriber knows of rank 1, so that rank is sent whole.
    assert by_rank[1].snapshot.count == 1


async def test_a_publisher_that_connects_is_heard() -> None:
    """An endpoint without a wildcard makes the publisher connect, so the relay has to bind."""
    with publishing(replay=False) as free:
        endpoint = free.endpoint
    async with kv_served([source(0, endpoint, None)]) as served:
        with publishing(endpoint, bind=False, replay=False) as publisher:
            await until(lambda: bool(_sent(served, publisher, 0)))
            (first,) = await served.subscribe().read()
            assert first.dp_rank == 0


async def test_subscriptions_end_unavailable_when_the_server_stops() -> None:
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            await subscription.call.initial_metadata()
            served.board.stopped()
            code, _ = await subscription.end()
            assert code is Code.UNAVAILABLE


async def test_a_relay_that_fails_ends_its_subscriptions(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own fault is told as one; nobody waits for a thread that is gone."""
    with publishing() as publisher:
        async with kv_served([of(publisher)]) as served:
            subscription = served.subscribe()
            await subscription.call.initial_metadata()

            def fail(*_: object) -> None:
                raise RuntimeError("a bug")

            monkeypatch.setattr(served.relay.record(0), "live", fail)
            publisher.publish(batch(0))
            code, details = await subscription.end()
            assert code is Code.INTERNAL
            assert "a bug" in details
            with pytest.raises(Unavailable):
                await served.relay.state(0)


async def test_load_records_come_before_the_first_batch_when_asked_for() -> None:
    """An engine that wedges on its first request is seen only by its load records."""
    rows = [Load(rank=0, running_requests=1), Load(rank=1, running_requests=2)]

    async def read() -> list[Load]:
        return rows

    loads = LoadSampler(read, lambda: Activity(9.0, True, 4096), seconds=0.01)
    with publishing() as zero, publishing() as one:
        async with kv_served([of(zero, 0), of(one, 1)], loads=loads) as served:
            subscription = served.subscribe(early_loads=True)
            first = [await subscription.read_load() for _ in range(2)]
            assert [(b.sequence_number, b.dp_rank) for b in first] == [(0, 0), (0, 1)]
            assert [b.load.running_requests for b in first] == [1, 2]
            assert [b.load.sample for b in first] == [1, 2]
            assert first[0].load.engine_silence_ms == 9000
            assert first[0].load.engine_reports_steps
            assert first[0].load.prefill_pending_tokens == 4096

            # A rank that is busy does not keep another's news back.
            rows[1] = Load(rank=1, running_requests=500)
            moved = await subscription.read_load()
            assert (moved.dp_rank, moved.load.running_requests) == (1, 500)

            zero.publish(batch(0))
            with_events = (await subscription.read())[0]
            assert with_events.load.running_requests == 1
            assert not with_events.load.load_only
            subscription.call.cancel()
            await until(lambda: not served.service.statistics()["subscribers"])
