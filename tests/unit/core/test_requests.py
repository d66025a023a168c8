from __future__ import annotations

import pytest

from smg_grpc_servicer.core import mailbox
from smg_grpc_servicer.core.errors import AlreadyExists, EngineDead, InvalidArgument
from smg_grpc_servicer.core.requests import Phase, RequestTable
from smg_grpc_servicer.core.types import Delta, Finish

NOTHING = {"in_flight": 0, "pending": 0, "open_choices": 0, "owed": 0}


def test_an_id_in_flight_is_refused_and_its_owner_not_touched() -> None:
    """O3: the second "x" is refused; the first goes on."""
    table = RequestTable()
    first = table.admit("x", stream=True)

    with pytest.raises(AlreadyExists, match="request_id: 'x'"):
        table.admit("x", stream=True)

    assert not first.mailbox.ended
    table.release(first)
    assert table.statistics() == NOTHING


def test_a_request_without_an_id_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="request_id"):
        RequestTable().admit("", stream=True)


def test_a_late_release_does_not_touch_a_later_request_with_the_same_id() -> None:
    """V9."""
    table = RequestTable()
    first = table.admit("x", stream=True)
    table.release(first)
    second = table.admit("x", stream=True)

    table.release(first)

    assert table.in_flight == 1
    table.release(second)
    assert table.statistics() == NOTHING


def test_abort_compares_ids_whole() -> None:
    table = RequestTable()
    table.admit("req-10", stream=True)

    assert table.abort("req-1") is None
    assert table.abort("req-10") is not None
    assert table.abort("req-10") is None


def test_the_engine_is_told_at_most_once() -> None:
    ticket = RequestTable().admit("x", stream=True)
    ticket.phase = Phase.RUNNING

    assert ticket.must_abort()
    assert not ticket.must_abort()
    assert not ticket.leaving()


def test_the_engine_is_not_told_of_what_it_finished_itself() -> None:
    ticket = RequestTable().admit("x", stream=True)
    ticket.phase = Phase.RUNNING
    ticket.mailbox.put(Delta(finish=Finish("stop")))

    assert not ticket.leaving()


def test_an_abort_during_submit_waits_for_the_submitter() -> None:
    """T5: the engine may not know the id yet; the exit path tells it."""
    ticket = RequestTable().admit("x", stream=True)
    ticket.phase = Phase.SUBMITTING

    assert not ticket.must_abort()
    assert ticket.leaving()
    assert not ticket.leaving()


def test_a_request_that_never_reached_the_engine_is_not_aborted_there() -> None:
    assert not RequestTable().admit("x", stream=True).leaving()


def test_the_engine_owes_from_the_handing_over_to_its_end() -> None:
    """What is being prepared, or was finished and not yet read, is no silence of the engine."""
    table = RequestTable()
    first, second = (table.admit(name, stream=True) for name in "ab")
    seen = [table.busy_since]
    first.mailbox.owe()
    seen.append(table.busy_since)
    second.mailbox.owe()
    first.mailbox.put(Delta(token_ids=[1], finish=Finish("stop")))
    seen.append(table.busy_since)
    second.mailbox.put(Delta(finish=Finish("length")))
    seen.append(table.busy_since)

    assert (seen[0], seen[3]) == (None, None)
    assert isinstance(seen[1], float)
    assert seen[1] == seen[2]
    assert table.in_flight == 2


@pytest.mark.parametrize("end", ["fail", "cut", "abort", "release"])
def test_every_end_settles_what_was_owed(end: str) -> None:
    table = RequestTable()
    ticket = table.admit("a", stream=True)
    ticket.mailbox.owe()
    if end in ("fail", "cut"):
        getattr(ticket.mailbox, end)(EngineDead("gone"))
    elif end == "abort":
        ticket.mailbox.abort()
    else:
        table.release(ticket)

    assert table.busy_since is None
    table.release(ticket)
    assert table.statistics() == NOTHING


def test_the_fullest_mailbox_pays_when_all_hold_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is bounded in sum, not only for each reader that does not read."""
    monkeypatch.setattr(mailbox, "MAX_PENDING_IN_ALL", 10)
    table = RequestTable()
    small, large = (table.admit(name, stream=True) for name in "ab")
    large.mailbox.put(Delta(token_ids=[1] * 8))
    small.mailbox.put(Delta(token_ids=[1] * 3))

    assert large.mailbox.ended
    assert not small.mailbox.ended
    table.release(large)
    table.release(small)
    assert table.statistics() == NOTHING


def test_an_endless_id_is_refused() -> None:
    with pytest.raises(InvalidArgument, match="at most 512"):
        RequestTable().admit("x" * 513, stream=True)


def test_a_dead_engine_ends_every_stream() -> None:
    table = RequestTable()
    tickets = [table.admit(name, 2, stream=True) for name in "abc"]

    table.fail_all(EngineDead("gone"))

    assert all(ticket.mailbox.ended for ticket in tickets)
