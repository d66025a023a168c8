"""Load records (`EngineLoad`): what a rank has to do, beside its events and on its own clock.

A record goes with every batch; by itself (`load_only`) it goes out when it moved, and as a
heartbeat. Figures are those of GetLoads. What nobody knows stays unset; `engine_silence_ms` above
all, because the gateway takes a worker out of service for a wrong one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.core.loads import Load, fill_section

HEARTBEAT_SECONDS = 1.0
QUIET_SECONDS = 5.0
"""The heartbeat once nothing has moved for `QUIET_AFTER` of them."""
QUIET_AFTER = 2

_U32 = 2**32 - 1
_SECTIONS = ("memory", "queues", "speculative", "lora", "disaggregation")


@dataclass(frozen=True, slots=True)
class Activity:
    """What the requests in flight tell beside the figures; None = nobody can tell."""

    silence_seconds: float | None = None
    """Since the last output of any kind, while requests that are reported at every step run."""
    reports_steps: bool | None = None
    prefill_pending_tokens: int | None = None


NO_ACTIVITY = Activity()


def silence(
    streaming_since: float | None, outputs: Iterable[float | None], now: float
) -> float | None:
    """Seconds without any sign of the engine; None while nothing is in flight that would show it.

    :param streaming_since: when the first of the streamed requests in flight began.
    :param outputs: when each kind of sign was last seen.
    """
    if streaming_since is None:
        return None
    signs = [at for at in outputs if at is not None]
    return max(now - max(streaming_since, *signs), 0.0) if signs else now - streaming_since


class Sample:
    """One rank's figures and when they were read (`monotonic` seconds)."""

    __slots__ = ("activity", "core", "load", "read_at")

    def __init__(self, load: Load, read_at: float, activity: Activity = NO_ACTIVITY) -> None:
        self.load = load
        self.read_at = read_at
        self.activity = activity
        self.core = _core(load, activity)
        """What every record of this reading says; made once, for many batches and streams."""


def _core(load: Load, activity: Activity) -> common_pb2.EngineLoad:
    silence = activity.silence_seconds
    return common_pb2.EngineLoad(
        running_requests=_count(load.running_requests) or 0,
        waiting_requests=_count(load.waiting_requests) or 0,
        waiting_uncached_tokens=_count(load.waiting_uncached_tokens),
        token_usage=load.token_usage or 0.0,
        active_token_usage=load.active_token_usage,
        gen_throughput=load.gen_throughput or 0.0,
        max_running_requests=_count(load.max_running_requests) or 0,
        engine_silence_ms=None if silence is None else min(int(silence * 1000), _U32),
        engine_reports_steps=activity.reports_steps,
        prefill_pending_tokens=_count(activity.prefill_pending_tokens),
    )


def moved(old: Load, new: Load) -> bool:
    """Whether the gateway should hear of it before the next heartbeat."""
    if (
        old.running_requests,
        old.waiting_requests,
        old.waiting_uncached_tokens,
        old.max_running_requests,
    ) != (
        new.running_requests,
        new.waiting_requests,
        new.waiting_uncached_tokens,
        new.max_running_requests,
    ):
        return True
    usage = _apart(old.token_usage, new.token_usage, 0.005)
    active = _apart(old.active_token_usage, new.active_token_usage, 0.005)
    rate = _apart(
        old.gen_throughput, new.gen_throughput, max(50.0, 0.05 * (old.gen_throughput or 0.0))
    )
    return usage or active or rate


def _apart(old: float | None, new: float | None, bound: float) -> bool:
    if old is None or new is None:
        return old is not new
    return abs(old - new) > bound


class Records:
    """One stream's records of one rank: their numbers, their telemetry, their pace."""

    def __init__(self, count: Callable[[], int]) -> None:
        self._count = count
        """The stream's next sample number; all ranks share it."""
        self._sent: Load | None = None
        self._sent_at: float | None = None
        self._unmoved = 0

    def with_batch(self, batch: common_pb2.KvEventBatch, sample: Sample, now: float) -> None:
        """Put a record into a batch of events."""
        self._number(batch.load, sample, now)
        if self._sent_at is None:
            _telemetry(batch.load, sample.load)
        self._note(sample.load, now)
        self._unmoved = 0

    def alone(self, batch: common_pb2.KvEventBatch, sample: Sample, now: float) -> None:
        """Make a batch a `load_only` record."""
        self._number(batch.load, sample, now)
        batch.load.load_only = True
        _telemetry(batch.load, sample.load)
        unmoved = self._sent is not None and not moved(self._sent, sample.load)
        self._unmoved = self._unmoved + 1 if unmoved else 0
        self._note(sample.load, now)

    def due(self, sample: Sample, now: float) -> bool:
        """Whether it is time for a `load_only` record."""
        if self._sent is None or self._sent_at is None:
            return True
        if moved(self._sent, sample.load):
            return True
        quiet = self._unmoved >= QUIET_AFTER and sample.activity.silence_seconds is None
        return now - self._sent_at >= (QUIET_SECONDS if quiet else HEARTBEAT_SECONDS)

    def _note(self, load: Load, now: float) -> None:
        self._sent, self._sent_at = load, now

    def _number(self, record: common_pb2.EngineLoad, sample: Sample, now: float) -> None:
        record.MergeFrom(sample.core)
        record.sample = self._count()
        record.age_ms = min(max(int((now - sample.read_at) * 1000), 0), _U32)


def _telemetry(record: common_pb2.EngineLoad, load: Load) -> None:
    if load.cache_hit_rate is not None:
        record.cache_hit_rate = load.cache_hit_rate
    if load.used_tokens is not None:
        record.num_used_tokens = load.used_tokens
    if load.max_total_tokens is not None:
        record.max_total_num_tokens = load.max_total_tokens
    for name in _SECTIONS:
        fill_section(record, load, name)


def _count(value: int | None) -> int | None:
    return None if value is None else min(max(value, 0), _U32)
