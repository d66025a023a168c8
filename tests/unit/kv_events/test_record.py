from __future__ import annotations

import pytest

from smg_grpc_servicer.kv_events.history import Entry, History
from smg_grpc_servicer.kv_events.record import Ask, LossPace, RankRecord
from tests.support.kv_publisher import payload, stored


def batch(number: int, ts: float = 1.0) -> bytes:
    return payload(stored([number + 1]), ts=ts)


def record(
    *, can_replay: bool = True, known: int = 0, history: History | None = None
) -> RankRecord:
    """One that has seen the batches before `known`."""
    made = RankRecord(0, history or History(), can_replay=can_replay, clock=lambda: 0.0)
    for number in range(known):
        assert made.live(number, batch(number)) is None
    return made


def replay(rank: RankRecord, *batches: tuple[int, bytes], complete: bool = True) -> Ask | None:
    for number, data in batches:
        if not rank.replayed(number, data):
            break
    return rank.replay_ended(complete)


def test_a_late_first_batch_asks_for_all_before_it() -> None:
    rank = record()
    assert rank.live(2, batch(2)) == Ask(0)
    assert replay(rank, *((n, batch(n)) for n in range(3))) is None
    view = rank.history.view()
    assert (view.base, view.last, view.complete) == (0, 2, True)


def test_a_late_first_batch_without_replay_begins_a_record_that_is_not_whole() -> None:
    rank = record(can_replay=False)
    assert rank.live(5, batch(5)) is None
    assert (rank.history.view().base, rank.history.view().complete) == (5, False)
    assert rank.history.view().epoch == 0


def test_a_repeated_batch_is_dropped() -> None:
    rank = record(known=3)
    assert rank.live(1, batch(1)) is None
    assert rank.counts["duplicates"] == 1
    assert rank.history.view().epoch == 0


def test_an_old_number_with_other_contents_is_another_publisher() -> None:
    """Weak point of a sequence alone: nobody said that the connection was lost."""
    rank = record(known=3, can_replay=False)
    assert rank.live(0, batch(0, ts=99.0)) is None
    view = rank.history.view()
    assert (view.epoch, view.base, view.last) == (1, 0, 0)
    assert rank.blocks.live == 1


def test_an_old_number_that_nobody_remembers_is_looked_up() -> None:
    rank = record(known=6, history=History(2))
    assert rank.live(1, batch(1)) == Ask(5)
    assert replay(rank, (5, batch(5))) is None
    assert rank.history.view().epoch == 0


def test_a_gap_is_filled_from_the_last_known_batch_on() -> None:
    rank = record(known=2)
    assert rank.live(4, batch(4)) == Ask(1)
    assert rank.asking
    assert replay(rank, *((n, batch(n)) for n in range(1, 5))) is None
    assert rank.history.view().last == 4
    assert not rank.asking


def test_a_gap_to_another_process_is_a_restart() -> None:
    rank = record(known=2)
    assert rank.live(9, batch(9, ts=50.0)) == Ask(1)
    assert replay(rank, (1, batch(1, ts=50.0))) == Ask(0)
    assert replay(rank, *((n, batch(n, ts=50.0)) for n in range(10))) is None
    view = rank.history.view()
    assert (view.epoch, view.base, view.last) == (1, 0, 9)


def test_an_empty_replay_counts_as_a_restart() -> None:
    rank = record(known=2)
    assert rank.live(4, batch(4)) == Ask(1)
    assert replay(rank) == Ask(0)
    assert replay(rank) is None
    assert (rank.history.view().epoch, rank.history.view().base) == (1, 4)


def test_a_replay_that_has_rolled_on_is_a_loss() -> None:
    rank = record(known=2)
    assert rank.live(9, batch(9)) == Ask(1)
    assert replay(rank, *((n, batch(n)) for n in range(7, 10))) is None
    view = rank.history.view()
    assert (view.epoch, view.base, view.first, view.last) == (1, 7, 7, 9)
    assert "no longer has batch 1" in view.reason


def test_a_replay_with_holes_is_asked_on_as_long_as_it_helps() -> None:
    """A publisher's socket drops what a slow reader leaves; what came is not asked for again."""
    rank = record(known=2)
    assert rank.live(9, batch(9)) == Ask(1)
    assert replay(rank, (1, batch(1)), (2, batch(2)), (5, batch(5))) == Ask(2)
    assert replay(rank, (2, batch(2)), (5, batch(5))) is None
    view = rank.history.view()
    assert (view.epoch, view.base) == (1, 9)


def test_a_corrupt_batch_is_asked_for_once() -> None:
    rank = record(known=2)
    assert rank.live(2, b"\xc1") == Ask(1)
    assert replay(rank, (1, batch(1)), (2, batch(2))) is None
    assert (rank.history.view().epoch, rank.history.view().last) == (0, 2)
    assert rank.live(3, b"\xc1") == Ask(2)
    assert replay(rank, (2, batch(2)), (3, b"\xc1"), (4, batch(4))) is None
    view = rank.history.view()
    assert (view.epoch, view.base, view.last) == (1, 4, 4)


def test_a_corrupt_first_batch_is_asked_for_too() -> None:
    rank = record()
    assert rank.live(0, b"\xc1") == Ask(0)
    assert replay(rank, (0, batch(0))) is None
    assert rank.history.view().complete


def test_after_a_lost_connection_the_next_batch_is_verified() -> None:
    rank = record(known=2)
    rank.disconnected()
    assert rank.live(2, batch(2)) == Ask(1)
    assert replay(rank, (1, batch(1)), (2, batch(2))) is None
    assert rank.history.view().epoch == 0
    assert rank.live(3, batch(3)) is None


def test_without_replay_a_lost_connection_is_a_restart() -> None:
    rank = record(known=2, can_replay=False)
    rank.disconnected()
    assert rank.connected() is None
    assert rank.history.view().epoch == 1
    assert rank.history.view().last is None


def test_what_an_older_process_said_last_is_not_taken_for_the_next_of_a_new_one() -> None:
    rank = record()
    assert rank.live(40, batch(40)) == Ask(0)
    assert replay(rank, (0, batch(0, ts=9.0))) is None
    assert rank.history.view().last == 0


def test_a_probe_looks_for_a_tail() -> None:
    rank = record(known=2)
    assert rank.probe() == Ask(1)
    assert replay(rank, (1, batch(1)), (2, batch(2))) is None
    assert rank.history.view().last == 2


def test_losses_in_a_row_are_held_longer_and_longer() -> None:
    pace = LossPace()
    assert pace.strike(0.0) == 0.0
    assert [pace.strike(float(n)) - n for n in range(1, 8)] == [1, 2, 4, 8, 16, 30, 30]
    news = []
    for _ in range(5):
        news.append(pace.is_news)
        pace.strike(8.0)
    assert news == [True, False, False, False, False]
    assert pace.strike(1000.0) == 1000.0


@pytest.mark.parametrize("limits", [(3, 1 << 20), (1000, 1500)])
def test_a_history_is_bounded(limits: tuple[int, int]) -> None:
    history = History(*limits)
    for number in range(50):
        history.append(Entry(number, bytes(100), number, number, 1))
    statistics = history.statistics()
    assert statistics["history_batches"] <= limits[0]
    assert statistics["history_bytes"] <= limits[1]
    assert history.view().last == 49
    assert [e.sequence for e in history.after(47, 10)] == [48, 49]
    assert history.after(3, 10) == []
    assert history.digest(49) == 49


def test_a_batch_that_no_message_can_carry_leaves_a_snapshot_as_the_only_way() -> None:
    history = History()
    history.append(Entry(0, b"x", 0, 0, 1))
    history.append(Entry(1, bytes(5 << 20), 1, 1, 1))
    view = history.view()
    assert (view.base, view.first, view.last, view.complete) == (0, None, 1, False)
