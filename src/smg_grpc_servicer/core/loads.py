"""Load reports: which ranks a GetLoads request wants, and the fields all protos share.

What nobody knows stays at the proto's zero; sums and means run over the ranks that know.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from datetime import datetime, timezone
from typing import Any

from smg_grpc_servicer.core.errors import InvalidArgument

Message = Any


@dataclass(frozen=True, slots=True)
class MemoryLoad:
    """Where a rank's accelerator memory went. Sections of a load have the protos' field names."""

    weight_gb: float
    kv_cache_gb: float
    graph_gb: float
    token_capacity: int


@dataclass(frozen=True, slots=True)
class QueueLoad:
    """Requests by the queue they stand in."""

    waiting: int
    grammar: int
    paused: int
    retracted: int


@dataclass(frozen=True, slots=True)
class SpeculativeLoad:
    """How well the draft model guesses."""

    accept_length: float
    accept_rate: float


@dataclass(frozen=True, slots=True)
class LoraLoad:
    """Adapters in a rank's pool."""

    slots_used: int
    slots_total: int
    utilization: float


@dataclass(frozen=True, slots=True)
class DisaggregationLoad:
    """A prefill's or decode's queues, and how its KV transfers went."""

    mode: str
    prefill_prealloc_queue_reqs: int
    prefill_inflight_queue_reqs: int
    decode_prealloc_queue_reqs: int
    decode_transfer_queue_reqs: int
    decode_retracted_queue_reqs: int
    kv_transfer_speed_gb_s: float
    kv_transfer_latency_ms: float


@dataclass(frozen=True, slots=True)
class Load:
    """One data-parallel rank's load; None = unknown, which is not zero."""

    rank: int = 0
    running_requests: int | None = None
    waiting_requests: int | None = None
    waiting_uncached_tokens: int | None = None
    used_tokens: int | None = None
    max_total_tokens: int | None = None
    max_running_requests: int | None = None
    token_usage: float | None = None
    active_token_usage: float | None = None
    gen_throughput: float | None = None
    cache_hit_rate: float | None = None
    utilization: float | None = None
    memory: MemoryLoad | None = None
    queues: QueueLoad | None = None
    speculative: SpeculativeLoad | None = None
    lora: LoraLoad | None = None
    disaggregation: DisaggregationLoad | None = None


def selected(request: Message, loads: Sequence[Load]) -> list[Load]:
    """The rank asked for (none, when it is not here) or all.

    :raises InvalidArgument: a negative rank.
    """
    if not request.HasField("dp_rank"):
        return list(loads)
    if request.dp_rank < 0:
        raise InvalidArgument("dp_rank", f"must not be negative, got {request.dp_rank}")
    return [load for load in loads if load.rank == request.dp_rank]


def known(load: Load) -> dict[str, Any]:
    """The known fields of a `SchedulerLoad`, by the name that all three protos use."""
    fields = {
        "dp_rank": load.rank,
        "num_running_reqs": load.running_requests,
        "num_waiting_reqs": load.waiting_requests,
        "num_total_reqs": total(load),
        "num_used_tokens": load.used_tokens,
        "max_total_num_tokens": load.max_total_tokens,
        "max_running_requests": load.max_running_requests,
        "num_waiting_uncached_tokens": load.waiting_uncached_tokens,
        "token_usage": load.token_usage,
        "gen_throughput": load.gen_throughput,
        "cache_hit_rate": load.cache_hit_rate,
    }
    return {name: value for name, value in fields.items() if value is not None}


def total(load: Load) -> int | None:
    """Requests on the rank; None unless both halves are known."""
    if load.running_requests is None or load.waiting_requests is None:
        return None
    return load.running_requests + load.waiting_requests


def aggregate(loads: Sequence[Load]) -> dict[str, Any]:
    """The known fields of an `AggregateMetrics` over `loads`; rounded as SGLang rounds them."""
    sums = {
        "total_running_reqs": _known(load.running_requests for load in loads),
        "total_waiting_reqs": _known(load.waiting_requests for load in loads),
        "total_reqs": _known(total(load) for load in loads),
    }
    means = {
        "avg_token_usage": (_known(load.token_usage for load in loads), 4),
        "avg_throughput": (_known(load.gen_throughput for load in loads), 2),
    }
    fields: dict[str, Any] = {name: sum(values) for name, values in sums.items() if values}
    for name, (values, digits) in means.items():
        if values:
            fields[name] = round(sum(values) / len(values), digits)
    return fields


def fill_section(message: Message, load: Load, name: str) -> None:
    """Copy a section of `load` into the field of that name; nothing when the rank tells none.

    The protos' messages have the same field names as ours.
    """
    section = getattr(load, name)
    if section is None:
        return
    part = getattr(message, name)
    part.SetInParent()
    for field in fields(section):
        setattr(part, field.name, getattr(section, field.name))


def _known(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def now() -> str:
    """ISO 8601, UTC."""
    return datetime.now(timezone.utc).isoformat()
