"""`mlx.grpc.engine.MlxEngine`: proto to core and back.

The proto's plain scalars cannot tell "unset" from zero; zero means off there, as the gateway
sends it. Source: `mlx_engine.proto` of smg-grpc-proto.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from smg_grpc_proto.generated import mlx_engine_pb2 as pb

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.types import (
    Delta,
    Finish,
    GenerateSpec,
    LogprobRows,
    LogprobSpec,
    ModelFacts,
    Sampling,
    ServerFacts,
)
from smg_grpc_servicer.core.wire import Choice, LiveFacts, Wire


class MlxWire(Wire):
    """See the module."""

    service: ClassVar[str] = "mlx.grpc.engine.MlxEngine"
    paths: ClassVar[Mapping[str, str]] = {
        "prompt": "tokenized.input_ids",
        "text": "text",
        "rank": "data_parallel_rank",
    }

    def generate_spec(self, request: pb.GenerateRequest) -> GenerateSpec:
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidArgument("input", "one of tokenized and text is required")
        sent = request.sampling_params
        return GenerateSpec(
            request_id=request.request_id,
            prompt=request.tokenized.input_ids,
            text=request.text if kind == "text" else None,
            sampling=Sampling(
                temperature=sent.temperature if sent.HasField("temperature") else None,
                top_p=sent.top_p or None,
                top_k=sent.top_k or None,
                min_p=sent.min_p or None,
                frequency_penalty=sent.frequency_penalty or None,
                presence_penalty=sent.presence_penalty or None,
                repetition_penalty=sent.repetition_penalty or None,
                max_tokens=sent.max_tokens if sent.HasField("max_tokens") else None,
                stop_token_ids=tuple(sent.stop_token_ids),
                ignore_eos=sent.ignore_eos,
                seed=sent.seed if sent.HasField("seed") else None,
                logit_bias=dict(sent.logit_bias),
            ),
            # Zero asks for none here: what the published package does, and all the gateway sends.
            logprobs=LogprobSpec(output=sent.logprobs or None),
            stream=request.stream,
        )

    def chunk(self, spec: GenerateSpec, choice: Choice, delta: Delta) -> pb.GenerateResponse:
        response, new = choice.message(pb.GenerateResponse, delta)
        chunk = response.chunk
        chunk.token_ids[:] = delta.token_ids
        chunk.completion_tokens = len(choice.token_ids)
        if new:
            chunk.prompt_tokens = choice.prompt_tokens
            chunk.cached_tokens = choice.cached_tokens
            chunk.index = choice.index
        if delta.logprobs is not None:
            fill_logprobs(chunk.output_logprobs, delta.token_ids, delta.logprobs)
        return response

    def complete(self, spec: GenerateSpec, choice: Choice, finish: Finish) -> pb.GenerateResponse:
        response = pb.GenerateResponse()
        complete = response.complete
        complete.output_ids.extend(choice.token_ids)
        complete.finish_reason = finish.reason
        complete.prompt_tokens = choice.prompt_tokens
        complete.completion_tokens = len(choice.token_ids)
        complete.cached_tokens = choice.cached_tokens
        complete.index = choice.index
        if isinstance(finish.matched, int):
            complete.matched_stop_token_id = finish.matched
        if choice.logprobs is not None:
            fill_logprobs(complete.output_logprobs, choice.token_ids, choice.logprobs)
        return response

    def abort_ids(self, request: pb.AbortRequest) -> Sequence[str]:
        return list(request.request_ids)

    def abort_response(self, found: Sequence[str]) -> pb.AbortResponse:
        return pb.AbortResponse()

    def health_response(self, healthy: bool, message: str) -> pb.HealthCheckResponse:
        return pb.HealthCheckResponse(healthy=healthy, message=message)

    def model_info(self, facts: ModelFacts) -> pb.GetModelInfoResponse:
        return pb.GetModelInfoResponse(
            model_path=facts.model_path,
            is_generation=facts.is_generation,
            max_context_length=facts.max_context_length or 0,
            vocab_size=facts.vocab_size or 0,
            served_model_name=facts.served_model_name,
            model_type=facts.model_type or "",
            architectures=facts.architectures,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id or 0,
            bos_token_id=facts.bos_token_id or 0,
            max_req_input_len=facts.max_prompt_tokens or facts.max_context_length or 0,
        )

    def server_info(self, facts: ServerFacts, live: LiveFacts) -> pb.GetServerInfoResponse:
        return pb.GetServerInfoResponse(
            server_type=facts.server_type,
            active_requests=live.active_requests,
            uptime_seconds=live.uptime_seconds,
        )


def fill_logprobs(part: pb.OutputLogProbs, token_ids: Sequence[int], rows: LogprobRows) -> None:
    """Rows in step with their ids, by whole lists (element by element costs two to three times)."""
    part.token_logprobs.extend(rows.values)
    part.token_ids.extend(token_ids)
    for ids, values in zip(rows.top_ids, rows.top_values, strict=True):
        row = part.top_logprobs.add()
        row.token_ids.extend(ids)
        row.values.extend(values)
