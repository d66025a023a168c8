from __future__ import annotations

from smg_grpc_servicer.mlx.pace import LONGEST, Pace


def test_an_idle_loop_gets_every_step_at_once() -> None:
    pace = Pace()
    for step in range(10):
        assert pace.due(step * 0.005, urgent=False)
        pace.taken(0.0002)


def test_a_late_loop_gets_several_steps_together() -> None:
    pace = Pace()
    assert pace.due(0.0, urgent=False)
    pace.taken(0.006)

    assert pace.window == 0.012
    assert [pace.due(at / 1000, urgent=False) for at in (5, 10, 15, 20)] == [
        False,
        False,
        False,
        True,
    ]


def test_a_first_token_and_an_end_are_never_held() -> None:
    pace = Pace()
    pace.taken(1.0)

    assert not pace.due(0.0, urgent=False)
    assert pace.due(0.001, urgent=True)


def test_no_token_is_held_for_long_however_late_the_loop_is() -> None:
    pace = Pace()
    pace.taken(10.0)

    assert pace.window == LONGEST
    assert not pace.due(0.0, urgent=False)
    assert pace.due(LONGEST, urgent=False)


def test_the_window_closes_when_the_loop_keeps_up_again() -> None:
    pace = Pace()
    pace.taken(0.01)
    for _ in range(8):
        pace.taken(0.0001)

    assert pace.window == 0.0
