from __future__ import annotations

from collections.abc import Sequence
from itertools import count
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.kv_events.loads import Activity, Records, Sample, moved, silence
from smg_grpc_servicer.kv_events.sampler import LoadSampler
from tests.support.wait import until

QUIET = Load(0, 1, 0, token_usage=0.5, gen_throughput=1000.0, cache_hit_rate=0.25)


class Bench:
    """One rank's records, as messages."""

    def __init__(self) -> None:
        numbers = count(1)
        self.records = Records(lambda: next(numbers))

    def due(self, sample: Sample, now: float) -> bool:
        return self.records.due(sample, now)

    def alone(self, sample: Sample, now: float) -> common_pb2.EngineLoad:
        batch = common_pb2.KvEventBatch()
        self.records.alone(batch, sample, now)
        return batch.load

    def with_batch(self, sample: Sample, now: float) -> common_pb2.EngineLoad:
        batch = common_pb2.KvEventBatch()
        self.records.with_batch(batch, sample, now)
        return batch.load


def records() -> Bench:
    return Bench()


@pytest.mark.parametrize(
    ("change", "tells"),
    [
        ({"running_requests": 2}, True),
        ({"waiting_requests": None}, True),
        ({"waiting_uncached_tokens": 5}, True),
        ({"max_running_requests": 5}, True),
        ({"token_usage": 0.504}, False),
        ({"token_usage": 0.506}, True),
        ({"active_token_usage": 0.1}, True),
        ({"gen_throughput": 1049.0}, False),
        ({"gen_throughput": 1051.0}, True),
        ({"cache_hit_rate": 0.9}, False),
    ],
)
def test_what_the_gateway_should_hear_of_at_once(change: dict[str, Any], tells: bool) -> None:
    fields = {name: getattr(QUIET, name) for name in Load.__dataclass_fields__}
    assert moved(QUIET, Load(**{**fields, **change})) is tells


def test_the_heartbeat_slows_down_after_two_without_news() -> None:
    pace, sample = records(), Sample(QUIET, 0.0)
    sent = []
    for tick in range(300):
        now = tick / 10
        if pace.due(sample, now):
            pace.alone(sample, now)
            sent.append(now)
    assert sent[:4] == [0.0, 1.0, 2.0, 7.0]
    assert pace.due(Sample(Load(0, 9), 0.0), 30.0)


def test_a_silent_engine_is_told_of_every_second() -> None:
    """A slow heartbeat would hide for 5 s that it went silent."""
    pace, sample = records(), Sample(QUIET, 0.0, Activity(4.0))
    for now in (0.0, 1.0, 2.0):
        pace.alone(sample, now)
    assert pace.due(sample, 3.0)


def test_telemetry_goes_with_the_first_record_and_the_heartbeat() -> None:
    pace, sample = records(), Sample(QUIET, 0.0)
    first, second = pace.with_batch(sample, 0.0), pace.with_batch(sample, 0.1)
    assert first.HasField("cache_hit_rate")
    assert not second.HasField("cache_hit_rate")
    alone = pace.alone(sample, 0.2)
    assert alone.HasField("cache_hit_rate")
    assert alone.load_only
    assert [r.sample for r in (first, second, alone)] == [1, 2, 3]


def test_unknown_figures_stay_unset() -> None:
    record = records().alone(Sample(Load(0), 1.0), 1.25)
    assert record.age_ms == 250
    for name in (
        "waiting_uncached_tokens",
        "active_token_usage",
        "engine_silence_ms",
        "engine_reports_steps",
        "prefill_pending_tokens",
        "num_used_tokens",
    ):
        assert not record.HasField(name)


def test_silence_is_known_only_while_a_stream_is_in_flight() -> None:
    assert silence(None, (5.0,), 100.0) is None
    assert silence(90.0, (5.0, None), 100.0) == 10.0
    assert silence(90.0, (97.0, 99.0), 100.0) == 1.0
    assert silence(90.0, (None, None), 100.0) == 10.0


async def test_a_source_that_fails_is_a_stream_without_records(
    caplog: pytest.LogCaptureFixture,
) -> None:
    broken = True

    async def read() -> Sequence[Load]:
        if broken:
            raise RuntimeError("no figures")
        return [QUIET]

    ticks: list[int] = []
    sampler = LoadSampler(read, Activity, seconds=0.001)
    leave = await sampler.watch(lambda: ticks.append(1))
    await until(lambda: len(ticks) > 3)
    assert sampler.samples == {}
    broken = False
    await until(lambda: 0 in sampler.samples)
    levels = [r.levelname for r in caplog.records if r.name.endswith("sampler")]
    assert levels.count("WARNING") == 1
    leave()
    assert sampler.statistics() == {"load_watchers": 0, "load_tasks": 0}
