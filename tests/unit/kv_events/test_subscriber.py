from __future__ import annotations

from smg_grpc_servicer.kv_events.history import View
from smg_grpc_servicer.kv_events.subscriber import (
    Lost,
    Place,
    Resume,
    Resync,
    Send,
    Wait,
    resume,
)

WHOLE = View(base=0, first=0, last=9)
ROLLED = View(base=0, first=5, last=9)


def test_a_new_subscriber_reads_a_whole_history_from_its_first_batch() -> None:
    assert Place().next(WHOLE, 0.0) == Send(-1)


def test_a_new_subscriber_of_a_rolled_history_gets_a_snapshot() -> None:
    assert Place().next(ROLLED, 0.0) == Resync()


def test_a_subscriber_that_may_know_numbers_gets_a_snapshot() -> None:
    """Batches from 0 on would look stale to one that remembers higher ones."""
    assert Place(named=True).next(WHOLE, 0.0) == Resync()


def test_before_anything_is_known_there_is_nothing_to_begin() -> None:
    assert Place().next(View(), 0.0) == Wait()


def test_a_rank_that_just_lost_events_is_held_back() -> None:
    view = View(base=0, first=0, last=1, held_until=5.0)
    assert Place().next(view, 4.0) == Wait(5.0)
    assert Place().next(view, 5.0) == Send(-1)


def test_no_snapshot_is_taken_while_batches_are_fetched() -> None:
    assert Place().next(View(base=0, first=5, last=9, settling=True), 0.0) == Wait()


def test_a_lagging_subscriber_gets_one_snapshot_and_then_a_loss() -> None:
    """J1: never silence, and no endless snapshots for one that cannot keep up."""
    place = Place.resumed(View(base=0, first=0, last=3), 3)
    assert place.next(ROLLED, 0.0) == Resync()
    place.begin(0, 9, holds=True)
    assert isinstance(place.next(View(base=0, first=20, last=30), 0.0), Lost)


def test_one_that_caught_up_in_between_gets_another_snapshot() -> None:
    place = Place.resumed(View(base=0, first=0, last=3), 3)
    assert place.next(ROLLED, 0.0) == Resync()
    place.begin(0, 9, holds=True)
    assert place.next(ROLLED, 0.0) == Wait()
    assert place.next(View(base=0, first=20, last=30), 0.0) == Resync()


def test_a_new_epoch_is_a_loss_for_those_who_hold_something_of_the_old() -> None:
    place = Place()
    place.sent(0, 4)
    assert place.next(View(epoch=1, reason="why"), 0.0) == Lost("why")


def test_one_that_holds_nothing_goes_on_with_a_snapshot() -> None:
    place = Place()
    place.begin(0, 4, holds=False)
    assert place.next(View(epoch=1, base=0, first=0, last=2), 0.0) == Resync()


def test_what_a_cursor_is_worth() -> None:
    assert resume(ROLLED, 9) is Resume.READY
    assert resume(ROLLED, 4) is Resume.READY
    assert resume(ROLLED, 3) is Resume.OLDER
    assert resume(ROLLED, 10) is Resume.SETTLING
    assert resume(View(), 1) is Resume.SETTLING


def test_the_lag_is_what_has_yet_to_be_sent() -> None:
    assert Place().lag(WHOLE) == 0
    assert Place.resumed(WHOLE, 7).lag(WHOLE) == 2
