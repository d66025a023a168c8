"""The calls around a server rather than a request."""

from __future__ import annotations

from time import time

import pytest

from smg_grpc_servicer.testing.dialects import DIALECTS, Dialect
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from tests.support.serving import served

every = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=lambda dialect: dialect.engine)
CLOCK = "smg_grpc_servicer.core.control.time"
KEY = "sk-abcdefghijklmnop1234567890ABCDEF"


class Ailing(FakeEngine):
    async def check_health(self) -> None:
        raise RuntimeError(f"no answer from {object()!r} with key {KEY}")


@every
async def test_an_unhealthy_engines_words_are_fit_to_be_shown(dialect: Dialect) -> None:
    """Q4: HealthCheck says why, without a credential and without an object's address."""
    async with served(dialect, Ailing()) as server:
        answer = await server.stub.HealthCheck(dialect.pb.HealthCheckRequest())
        assert not answer.healthy
        assert answer.message.startswith("RuntimeError: no answer from <object object>")
        assert KEY not in answer.message


@every
async def test_a_dead_engines_words_are_fit_to_be_shown(dialect: Dialect) -> None:
    """Q4: so is the reason of an engine that is gone."""
    async with served(dialect, FakeEngine()) as server:
        server.board.dead(f"lost {object()!r} with key {KEY}")
        answer = await server.stub.HealthCheck(dialect.pb.HealthCheckRequest())
        assert answer.message.startswith("engine dead: lost <object object>")
        assert KEY not in answer.message


@every
async def test_a_wall_clock_that_jumps_does_not_change_the_uptime(
    dialect: Dialect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NTP may set the clock by hours, back as well: the uptime goes on, the start stays."""
    async with served(dialect, FakeEngine()) as server:
        started = server.servicer.started_at
        for jump in (-86_400, 86_400):
            monkeypatch.setattr(CLOCK, lambda jump=jump: time() + jump)
            info = await server.stub.GetServerInfo(dialect.pb.GetServerInfoRequest())
            assert 0 < info.uptime_seconds < 60
        assert server.servicer.started_at == started


async def test_a_start_told_afterwards_counts() -> None:
    """A launcher tells when it began, before its engine was loaded."""
    dialect = DIALECTS["mlx"]
    async with served(dialect, FakeEngine()) as server:
        server.servicer.started_at -= 1000
        info = await server.stub.GetServerInfo(dialect.pb.GetServerInfoRequest())
        assert 1000 <= info.uptime_seconds < 1060
