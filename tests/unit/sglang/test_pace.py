"""Outputs wait on their socket only while the loop lags, and never for long."""

from __future__ import annotations

import pytest

from smg_grpc_servicer.sglang.pace import LAG, LONGEST, Pace


def test_a_loop_that_keeps_up_never_waits() -> None:
    pace = Pace()
    assert [pace.pause(LAG / 2) for _ in range(10)] == [0.0] * 10


def test_the_pause_follows_the_lag() -> None:
    pace = Pace()
    assert pace.pause(0.003) == pytest.approx(0.003)
    assert pace.pause(0.006) == pytest.approx(0.006)


@pytest.mark.parametrize("lag", [0.015, 0.02, 0.5, 60.0])
def test_from_one_reading_to_the_next_is_bounded(lag: float) -> None:
    assert Pace().pause(lag) == max(LONGEST - lag, 0.0)


def test_it_is_over_soon_after_the_lag_is() -> None:
    pace = Pace()
    pace.pause(0.01)
    left = 0
    while pace.window:
        pace.pause(0.0)
        left += 1
    assert left < 10
