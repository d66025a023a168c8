"""SGLang's own request tracing: the time statistics that carry a trace into the scheduler.

Made only when the engine runs with `--enable-trace`; without them the scheduler makes its own.
"""

from __future__ import annotations

from typing import Any

from smg_grpc_servicer.core.types import GenerateSpec


def begin(spec: GenerateSpec, rid: str, role: str, room: int | None) -> Any:
    """SGLang's statistics of one request, its root span begun as a child of the caller's."""
    from sglang.srt.disaggregation.utils import DisaggregationMode
    from sglang.srt.observability.req_time_stats import APIServerReqTimeStats

    stats = APIServerReqTimeStats(disagg_mode=DisaggregationMode(role))
    stats.init_trace_ctx(rid, room, dict(spec.trace) or None)
    stats.set_created_time()
    stats.set_tokenize_finish_time()
    return stats


def end(stats: Any) -> None:
    if not stats.finished_time:
        stats.set_finished_time()
