"""`tokenspeed.grpc.scheduler.TokenSpeedScheduler`: proto to core and back.

The sampling scalars carry presence, so an explicit zero is a zero; `min_new_tokens` and `n` are
plain and zero is off. `logprob_start_len` unset or -1 asks for no prompt logprobs. The proto's
answers have no room for prompt logprobs or for those of chosen ids: asking for either is refused.
Source: `tokenspeed_scheduler.proto` of smg-grpc-proto 0.4.28.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from google.protobuf.timestamp_pb2 import Timestamp
from smg_grpc_proto.generated import tokenspeed_scheduler_pb2 as pb

from smg_grpc_servicer.core import facts as config
from smg_grpc_servicer.core import loads as reports
from smg_grpc_servicer.core.errors import InvalidArgument, Unsupported
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.types import (
    Delta,
    Feature,
    Finish,
    GenerateSpec,
    KvTransfer,
    LogprobSpec,
    ModelFacts,
    Sampling,
    ServerFacts,
)
from smg_grpc_servicer.core.wire import Choice, LiveFacts, Wire
from smg_grpc_servicer.core.wire_parts import (
    bootstrap,
    fill_complete,
    fill_output,
    integer_bias,
    logprob_spec,
    refuse,
    text_constraint,
)
from smg_grpc_servicer.tokenspeed.fields import REFUSED_ALWAYS

WHO = "the TokenSpeed servicer"
CONSTRAINTS = {
    "regex": "regex",
    "json_schema": "json_schema",
    "ebnf_grammar": "grammar",
    "structural_tag": "structural_tag",
}
"""By member of the oneof."""


class TokenSpeedWire(Wire):
    """See the module."""

    service: ClassVar[str] = "tokenspeed.grpc.scheduler.TokenSpeedScheduler"
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
        return GenerateSpec(
            request_id=request.request_id,
            prompt=request.tokenized.input_ids,
            sampling=sampling(request.sampling_params),
            logprobs=logprobs(request),
            stream=request.stream,
            rank=request.data_parallel_rank if request.HasField("data_parallel_rank") else None,
            kv_transfer=kv_transfer(request),
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
            if choice.weight_version is not None:
                chunk.weight_version = choice.weight_version
        if delta.logprobs is not None:
            fill_output(chunk.output_logprobs, delta.token_ids, delta.logprobs)
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
            served_model_name=facts.served_model_name,
            model_type=facts.model_type or "",
            architectures=facts.architectures,
            max_context_length=facts.max_context_length or 0,
            max_req_input_len=facts.max_prompt_tokens or facts.max_context_length or 0,
            vocab_size=facts.vocab_size or 0,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id or 0,
            bos_token_id=facts.bos_token_id or 0,
            weight_version=facts.weight_version or "",
            default_sampling_params_json=config.default_sampling_json(facts.default_sampling),
            supports_vision=facts.supports_vision,
            supports_multimodal=facts.supports_vision,
            model_dtype=(facts.dtype or "").removeprefix("torch."),
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
            uptime_seconds=live.uptime_seconds,
            max_total_num_tokens=capacity or 0,
            tokenspeed_version=facts.version or "",
            start_time=started,
        )

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


def sampling(sent: pb.SamplingParams) -> Sampling:
    return Sampling(
        temperature=sent.temperature if sent.HasField("temperature") else None,
        top_p=sent.top_p if sent.HasField("top_p") else None,
        top_k=sent.top_k if sent.HasField("top_k") and sent.top_k != -1 else None,
        min_p=sent.min_p if sent.HasField("min_p") else None,
        frequency_penalty=sent.frequency_penalty if sent.HasField("frequency_penalty") else None,
        presence_penalty=sent.presence_penalty if sent.HasField("presence_penalty") else None,
        repetition_penalty=(
            sent.repetition_penalty if sent.HasField("repetition_penalty") else None
        ),
        max_tokens=sent.max_new_tokens if sent.HasField("max_new_tokens") else None,
        min_tokens=sent.min_new_tokens or None,
        stop=tuple(sent.stop),
        stop_token_ids=tuple(sent.stop_token_ids),
        ignore_eos=sent.ignore_eos,
        skip_special_tokens=sent.skip_special_tokens,
        spaces_between_special_tokens=sent.spaces_between_special_tokens,
        include_stop=sent.no_stop_trim,
        n=sent.n or 1,
        seed=sent.sampling_seed if sent.HasField("sampling_seed") else None,
        logit_bias=integer_bias("sampling_params.logit_bias", sent.logit_bias),
        constraint=text_constraint(sent, CONSTRAINTS),
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


def kv_transfer(request: pb.GenerateRequest) -> KvTransfer | None:
    if not request.HasField("kv_bootstrap_info"):
        return None
    sent = request.kv_bootstrap_info
    return bootstrap(
        "kv_bootstrap_info", sent.bootstrap_host, sent.bootstrap_port, sent.bootstrap_room
    )
