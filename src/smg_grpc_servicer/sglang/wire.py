"""`sglang.grpc.scheduler.SglangScheduler`: proto to core and back.

Nearly all scalars are plain, so that zero cannot be told from unset. As the published servicer
reads them: zero is off, but a `temperature` of 0 is greedy and a `logprob_start_len` of 0 asks for
the whole prompt (-1 for none). Source: `sglang_scheduler.proto` of smg-grpc-proto 0.4.28.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.scheduler_wire import (
    SchedulerWire,
    bootstrap,
    logprob_spec,
    sampling,
)
from smg_grpc_servicer.core.types import (
    Delta,
    EmbedSpec,
    Feature,
    Finish,
    GenerateSpec,
    LogprobRows,
)
from smg_grpc_servicer.core.wire import Choice
from smg_grpc_servicer.core.wire_parts import (
    fill_complete,
    fill_input,
    fill_output,
    given,
    refuse,
)
from smg_grpc_servicer.sglang import wire_loads
from smg_grpc_servicer.sglang.fields import REFUSED
from smg_grpc_servicer.sglang.wire_parts import custom_params, fill_hidden_states, media, references

WHO = "the SGLang servicer"


class SglangWire(SchedulerWire):
    """See the module."""

    service: ClassVar[str] = "sglang.grpc.scheduler.SglangScheduler"
    proto: ClassVar[Any] = pb
    version_field: ClassVar[str] = "sglang_version"
    paths: ClassVar[Mapping[str, str]] = {
        "prompt": "tokenized.input_ids",
        "max_tokens": "sampling_params.max_new_tokens",
        "min_tokens": "sampling_params.min_new_tokens",
        "logprobs": "top_logprobs_num",
        "prompt_logprobs": "top_logprobs_num",
        "token_ids_logprob": "token_ids_logprob",
        "rank": "data_parallel_rank",
    }

    def generate_spec(self, request: pb.GenerateRequest) -> GenerateSpec:
        refuse(request, REFUSED, WHO)
        if not request.HasField("tokenized") and not request.input_embeds:
            raise InvalidArgument("tokenized", "is required")
        params = request.sampling_params
        return GenerateSpec(
            request_id=request.request_id,
            prompt=request.tokenized.input_ids,
            # Its zero is greedy.
            sampling=sampling(params, temperature=params.temperature),
            logprobs=logprob_spec(request, request.logprob_start_len),
            stream=request.stream,
            rank=given(request, "data_parallel_rank"),
            lora_id=request.lora_id or None,
            kv_transfer=bootstrap(request, "disaggregated_params"),
            count_reasoning=request.require_reasoning,
            stream_interval=stream_interval(params),
            input_embeds=request.input_embeds,
            custom_params=custom_params(params.custom_params) or None,
            logit_processor=request.custom_logit_processor or None,
            hidden_states=request.return_hidden_states,
            media=media(WHO, request.mm_inputs) if request.HasField("mm_inputs") else None,
            references=references(request.mm_inputs) if request.HasField("mm_inputs") else None,
        )

    def chunk(self, spec: GenerateSpec, choice: Choice, delta: Delta) -> pb.GenerateResponse:
        response, new = choice.message(pb.GenerateResponse, delta)
        if new:
            response.request_id = spec.request_id
            response.chunk.reasoning_tokens = choice.reasoning_tokens
        if delta.logprobs is not None:
            fill_rows(response.chunk.output_logprobs, spec, delta.token_ids, delta.logprobs)
        if delta.prompt_logprobs is not None:
            fill_input(response.chunk.input_logprobs, delta.prompt_logprobs)
        return response

    def complete(self, spec: GenerateSpec, choice: Choice, finish: Finish) -> pb.GenerateResponse:
        response = pb.GenerateResponse(request_id=spec.request_id)
        complete = response.complete
        fill_complete(complete, choice, finish)
        complete.reasoning_tokens = choice.reasoning_tokens
        if choice.logprobs is not None:
            fill_rows(complete.output_logprobs, spec, choice.token_ids, choice.logprobs)
        elif choice.chosen:
            # The proto wants all of these in a stream's end too.
            fill_chosen(complete.output_logprobs, spec, choice.chosen)
        if choice.prompt_logprobs is not None:
            fill_input(complete.input_logprobs, choice.prompt_logprobs)
        if finish.hidden_states is not None:
            length = choice.prompt_tokens + len(choice.token_ids)
            fill_hidden_states(complete, finish.hidden_states, length)
        return response

    def embed_spec(self, request: pb.EmbedRequest) -> EmbedSpec:
        refuse(request, REFUSED, WHO)
        if not request.HasField("tokenized"):
            raise InvalidArgument("tokenized", "is required")
        rank = request.data_parallel_rank  # a plain field here: 0 is any rank
        if rank < 0:
            raise InvalidArgument("data_parallel_rank", f"must not be negative, got {rank}")
        return EmbedSpec(
            request.request_id,
            request.tokenized.input_ids,
            rank=rank or None,
            token_type_ids=request.token_type_ids,
            needs=frozenset({Feature.RANK}) if rank else frozenset(),
        )

    def loads_response(
        self, request: pb.GetLoadsRequest, loads: Sequence[Load], version: str
    ) -> pb.GetLoadsResponse:
        return wire_loads.loads_response(request, loads, version)


def stream_interval(sent: pb.SamplingParams) -> int | None:
    if not sent.HasField("stream_interval"):
        return None
    if sent.stream_interval < 1:
        raise InvalidArgument(
            "sampling_params.stream_interval", f"must be at least 1, got {sent.stream_interval}"
        )
    return sent.stream_interval


def fill_rows(
    part: pb.OutputLogProbs, spec: GenerateSpec, token_ids: Sequence[int], rows: LogprobRows
) -> None:
    """Rows in step with their ids, and those of the ids the request asked for."""
    fill_output(part, token_ids, rows)
    fill_chosen(part, spec, rows.chosen)


def fill_chosen(
    part: pb.OutputLogProbs, spec: GenerateSpec, chosen: Sequence[Sequence[float]]
) -> None:
    for values in chosen:
        row = part.token_ids_logprobs.add()
        row.values.extend(values)
        row.token_ids.extend(spec.logprobs.token_ids)
