"""`tokenspeed.grpc.scheduler.TokenSpeedScheduler`: proto to core and back.

The sampling scalars carry presence, so an explicit zero is a zero; `min_new_tokens` and `n` are
plain and zero is off. `logprob_start_len` unset or -1 asks for no prompt logprobs. The proto's
answers have no room for prompt logprobs or for those of chosen ids: asking for either is refused.
Source: `tokenspeed_scheduler.proto` of smg-grpc-proto 0.4.28.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from smg_grpc_servicer.core import loads as reports
from smg_grpc_servicer.core.errors import InvalidArgument, Unsupported
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.scheduler_wire import (
    SchedulerWire,
    bootstrap,
    logprob_spec,
    sampling,
)
from smg_grpc_servicer.core.types import Delta, Feature, Finish, GenerateSpec, LogprobSpec
from smg_grpc_servicer.core.wire import Choice
from smg_grpc_servicer.core.wire_parts import fill_complete, fill_output, given, refuse
from smg_grpc_servicer.tokenspeed.fields import REFUSED_ALWAYS

WHO = "the TokenSpeed servicer"


class TokenSpeedWire(SchedulerWire):
    """See the module."""

    service: ClassVar[str] = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"
    proto: ClassVar[Any] = pb
    version_field: ClassVar[str] = "tokenspeed_version"
    paths: ClassVar[Mapping[str, str]] = {
        "prompt": "tokenized.input_ids",
        "max_tokens": "sampling_params.max_new_tokens",
        "min_tokens": "sampling_params.min_new_tokens",
        "seed": "sampling_params.sampling_seed",
        "logprobs": "top_logprobs_num",
        "rank": "data_parallel_rank",
    }

    def generate_spec(self, request: pb.GenerateRequest) -> GenerateSpec:
        refuse(request, REFUSED_ALWAYS, WHO)
        if not request.HasField("tokenized"):
            raise InvalidArgument("tokenized", "is required")
        params = request.sampling_params
        return GenerateSpec(
            request_id=request.request_id,
            prompt=request.tokenized.input_ids,
            sampling=sampling(params, seed=given(params, "sampling_seed")),
            logprobs=logprobs(request),
            stream=request.stream,
            rank=given(request, "data_parallel_rank"),
            kv_transfer=bootstrap(request, "kv_bootstrap_info"),
        )

    def chunk(self, spec: GenerateSpec, choice: Choice, delta: Delta) -> pb.GenerateResponse:
        response, new = choice.message(pb.GenerateResponse, delta)
        if new:
            response.request_id = spec.request_id
            if choice.weight_version is not None:
                response.chunk.weight_version = choice.weight_version
        if delta.logprobs is not None:
            fill_output(response.chunk.output_logprobs, delta.token_ids, delta.logprobs)
        return response

    def complete(self, spec: GenerateSpec, choice: Choice, finish: Finish) -> pb.GenerateResponse:
        response = pb.GenerateResponse(request_id=spec.request_id)
        complete = response.complete
        fill_complete(complete, choice, finish)
        if choice.weight_version is not None:
            complete.weight_version = choice.weight_version
        if choice.logprobs is not None:
            fill_output(complete.output_logprobs, choice.token_ids, choice.logprobs)
        return response

    def loads_response(
        self, request: pb.GetLoadsRequest, loads: Sequence[Load], version: str
    ) -> pb.GetLoadsResponse:
        """Core figures; the other sections are absent, which reads as unknown."""
        chosen = reports.selected(request, loads)
        return pb.GetLoadsResponse(
            timestamp=reports.now(),
            version=version,
            dp_rank_count=len(chosen),
            loads=[
                pb.SchedulerLoad(**reports.known(load), active_token_usage=load.active_token_usage)
                for load in chosen
            ],
            aggregate=pb.AggregateMetrics(**reports.aggregate(chosen)) if chosen else None,
        )


def logprobs(request: pb.GenerateRequest) -> LogprobSpec:
    """:raises Unsupported: rows that an answer of this proto could not carry."""
    start = request.logprob_start_len if request.HasField("logprob_start_len") else -1
    asked = logprob_spec(request, start)
    if asked.prompt is not None:
        raise Unsupported(WHO, Feature.PROMPT_LOGPROBS.value)
    if asked.token_ids:
        raise Unsupported(WHO, Feature.TOKEN_LOGPROBS.value)
    return asked
