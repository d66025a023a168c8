"""`sglang.grpc.scheduler.SglangScheduler`: proto to core and back.

Nearly all scalars are plain, so that zero cannot be told from unset. As the published servicer
reads them: zero is off, but a `temperature` of 0 is greedy and a `logprob_start_len` of 0 asks for
the whole prompt (-1 for none). Source: `sglang_scheduler.proto` of smg-grpc-proto 0.4.28.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core import facts as config
from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.types import (
    Delta,
    Embedding,
    EmbedSpec,
    Feature,
    Finish,
    GenerateSpec,
    LogprobRows,
    ModelFacts,
    Sampling,
    ServerFacts,
)
from smg_grpc_servicer.core.wire import Choice, LiveFacts, Wire
from smg_grpc_servicer.core.wire_parts import (
    bootstrap,
    fill_complete,
    fill_input,
    fill_output,
    integer_bias,
    logprob_spec,
    refuse,
    text_constraint,
)
from smg_grpc_servicer.sglang import wire_loads
from smg_grpc_servicer.sglang.fields import REFUSED
from smg_grpc_servicer.sglang.wire_parts import custom_params, fill_hidden_states, media, references

WHO = "the SGLang servicer"
CONSTRAINTS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""By member of the oneof."""


class SglangWire(Wire):
    """See the module."""

    service: ClassVar[str] = "sglang.grpc.scheduler.SglangScheduler"
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
        sent, params = request.disaggregated_params, request.sampling_params
        return GenerateSpec(
            request_id=request.request_id,
            prompt=request.tokenized.input_ids,
            sampling=sampling(request.sampling_params),
            logprobs=logprob_spec(request, request.logprob_start_len),
            stream=request.stream,
            rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
            lora_id=request.lora_id or None,
            kv_transfer=bootstrap(
                "disaggregated_params",
                sent.bootstrap_host,
                sent.bootstrap_port,
                sent.bootstrap_room,
            )
            if request.HasField("disaggregated_params")
            else None,
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
        chunk = response.chunk
        chunk.token_ids[:] = delta.token_ids
        chunk.completion_tokens = len(choice.token_ids)
        if new:
            response.request_id = spec.request_id
            chunk.prompt_tokens = choice.prompt_tokens
            chunk.cached_tokens = choice.cached_tokens
            chunk.index = choice.index
            chunk.reasoning_tokens = choice.reasoning_tokens
        if delta.logprobs is not None:
            fill_rows(chunk.output_logprobs, spec, delta.token_ids, delta.logprobs)
        if delta.prompt_logprobs is not None:
            fill_input(chunk.input_logprobs, delta.prompt_logprobs)
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

    def embed_response(self, embedding: Embedding) -> pb.EmbedResponse:
        return pb.EmbedResponse(
            embedding=embedding.values,
            prompt_tokens=embedding.prompt_tokens,
            embedding_dim=len(embedding.values),
        )

    def abort_ids(self, request: pb.AbortRequest) -> Sequence[str]:
        return [request.request_id]

    def abort_response(self, found: Sequence[str]) -> pb.AbortResponse:
        """An id that is not here is a success too, so that an abort can be repeated."""
        return pb.AbortResponse(success=True, message="aborted" if found else "not in flight")

    def health_response(self, healthy: bool, message: str) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=healthy, message=message)

    def model_info(self, facts: ModelFacts) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model_path=facts.model_path,
            tokenizer_path=facts.tokenizer_path or "",
            is_generation=facts.is_generation,
            weight_version=facts.weight_version or "",
            served_model_name=facts.served_model_name,
            max_context_length=facts.max_context_length or 0,
            vocab_size=facts.vocab_size or 0,
            supports_vision=facts.supports_vision,
            model_type=facts.model_type or "",
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id or 0,
            bos_token_id=facts.bos_token_id or 0,
            max_req_input_len=facts.max_prompt_tokens or facts.max_context_length or 0,
            architectures=facts.architectures,
            default_sampling_params_json=config.default_sampling_json(facts.default_sampling),
            preferred_sampling_params=config.json_text(facts.preferred_sampling),
            id2label_json=config.json_text(facts.labels),
            num_labels=len(facts.labels),
        )

    def server_info(self, facts: ServerFacts, live: LiveFacts) -> pb.GetServerInfoResponse:
        started = Timestamp()
        started.FromNanoseconds(int(live.started_at * 1e9))
        capacity = config.count(facts.scheduler_info.get("max_total_num_tokens"))
        return pb.GetServerInfoResponse(
            server_args=config.to_struct(facts.server_args),
            scheduler_info=config.to_struct(facts.scheduler_info),
            active_requests=live.active_requests,
            is_paused=facts.is_paused,
            last_receive_timestamp=live.last_receive_at or 0.0,
            uptime_seconds=live.uptime_seconds,
            sglang_version=facts.version or "",
            server_type=facts.server_type,
            start_time=started,
            max_total_num_tokens=capacity or 0,
        )

    def loads_response(
        self, request: pb.GetLoadsRequest, loads: Sequence[Load], version: str
    ) -> pb.GetLoadsResponse:
        return wire_loads.loads_response(request, loads, version)


def sampling(sent: pb.SamplingParams) -> Sampling:
    return Sampling(
        temperature=sent.temperature,
        top_p=sent.top_p or None,
        top_k=None if sent.top_k in (-1, 0) else sent.top_k,
        min_p=sent.min_p or None,
        frequency_penalty=sent.frequency_penalty or None,
        presence_penalty=sent.presence_penalty or None,
        repetition_penalty=sent.repetition_penalty or None,
        max_tokens=sent.max_new_tokens if sent.HasField("max_new_tokens") else None,
        min_tokens=sent.min_new_tokens or None,
        stop=tuple(sent.stop),
        stop_token_ids=tuple(sent.stop_token_ids),
        ignore_eos=sent.ignore_eos,
        skip_special_tokens=sent.skip_special_tokens,
        spaces_between_special_tokens=sent.spaces_between_special_tokens,
        include_stop=sent.no_stop_trim,
        n=sent.n or 1,
        logit_bias=integer_bias("sampling_params.logit_bias", sent.logit_bias),
        constraint=text_constraint(sent, CONSTRAINTS),
    )


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
