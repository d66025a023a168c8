"""GetLoads of SGLang's proto: core figures always, the sections that were asked for."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core import loads as reports
from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.loads import Load

SECTION_FIELDS = {
    "memory": "memory",
    "spec": "speculative",
    "lora": "lora",
    "disagg": "disaggregation",
    "queues": "queues",
}
"""By SGLang's own names, which `include` has."""
SECTIONS = frozenset({"core", "all", *SECTION_FIELDS})


def loads_response(
    request: pb.GetLoadsRequest, loads: Sequence[Load], version: str
) -> pb.GetLoadsResponse:
    """A section that the rank does not tell is absent, which reads as unknown.

    :raises InvalidArgument: a section that does not exist, as SGLang itself answers.
    """
    for section in request.include:
        if section not in SECTIONS:
            allowed = ", ".join(sorted(SECTIONS))
            raise InvalidArgument("include", f"must be of {allowed}, got {section!r}")
    chosen = reports.selected(request, loads)
    return pb.GetLoadsResponse(
        timestamp=reports.now(),
        version=version,
        dp_rank_count=len(chosen),
        loads=[_row(load, request.include or ("all",)) for load in chosen],
        aggregate=_aggregate(chosen) if chosen else None,
    )


def _row(load: Load, include: Collection[str]) -> pb.SchedulerLoad:
    row = pb.SchedulerLoad(**reports.known(load))
    if load.utilization is not None:
        row.utilization = load.utilization
    for section, field in SECTION_FIELDS.items():
        if "all" in include or section in include:
            reports.fill_section(row, load, field)
    return row


def _aggregate(loads: Sequence[Load]) -> pb.AggregateMetrics:
    made = pb.AggregateMetrics(**reports.aggregate(loads))
    known = [load.utilization for load in loads if load.utilization is not None]
    if known:
        made.avg_utilization = round(sum(known) / len(known), 4)
    return made
