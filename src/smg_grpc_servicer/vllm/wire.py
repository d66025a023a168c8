"""`vllm.grpc.engine.VllmEngine`: proto to core and back.

Plain scalars cannot tell "unset" from zero: zero is off for all of them, as the published servicer
reads them; the flags are taken as sent. `temperature`, `max_tokens`, `logprobs`, `prompt_logprobs`,
`seed` and the rank carry presence. Source: `vllm_engine.proto` of smg-grpc-proto 0.4.28.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import ClassVar

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.core import facts as config
from smg_grpc_servicer.core import loads as reports
from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.types import (
    Constraint,
    Delta,
    Embedding,
    EmbedSpec,
    Finish,
    GenerateSpec,
    KvTransfer,
    LogprobSpec,
    ModelFacts,
    PairingFacts,
    Sampling,
    ServerFacts,
)
from smg_grpc_servicer.core.wire import Choice, LiveFacts, Wire
from smg_grpc_servicer.core.wire_parts import (
    fill_complete,
    fill_input,
    fill_output,
    json_object,
    refuse,
)
from smg_grpc_servicer.vllm.fields import REFUSED

log = logging.getLogger(__name__)

SMALL = 512
"""Bytes of sampling parameters that are worth being remembered."""


class VllmWire(Wire):
    """See the module."""

    service: ClassVar[str] = "vllm.grpc.engine.VllmEngine"
    paths: ClassVar[Mapping[str, str]] = {
        "prompt": "tokenized.input_ids",
        "text": "text",
        "rank": "data_parallel_rank",
        "truncate_prompt": "sampling_params.truncate_prompt_tokens",
    }

    def generate_spec(self, request: pb.GenerateRequest) -> GenerateSpec:
        refuse(request, REFUSED, "the vLLM servicer")
        kind = request.WhichOneof("input")
        if kind is None:
            raise InvalidArgument("input", "one of tokenized and text is required")
        sent = request.sampling_params
        asked, logprobs = (
            _seen(sent.SerializeToString()) if sent.ByteSize() <= SMALL else _read(sent)
        )
        return GenerateSpec(
            request_id=request.request_id,
            prompt=request.tokenized.input_ids,
            text=request.text if kind == "text" else None,
            truncate_prompt=(
                sent.truncate_prompt_tokens if sent.HasField("truncate_prompt_tokens") else None
            ),
            sampling=asked,
            logprobs=logprobs,
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
            chunk.prompt_tokens = choice.prompt_tokens
            chunk.cached_tokens = choice.cached_tokens
            chunk.index = choice.index
        if delta.logprobs is not None:
            fill_output(chunk.output_logprobs, delta.token_ids, delta.logprobs)
        if delta.prompt_logprobs is not None:
            fill_input(chunk.input_logprobs, delta.prompt_logprobs)
        return response

    def complete(self, spec: GenerateSpec, choice: Choice, finish: Finish) -> pb.GenerateResponse:
        response = pb.GenerateResponse()
        complete = response.complete
        fill_complete(complete, choice, finish)
        if choice.logprobs is not None:
            fill_output(complete.output_logprobs, choice.token_ids, choice.logprobs)
        if choice.prompt_logprobs is not None:
            fill_input(complete.input_logprobs, choice.prompt_logprobs)
        if finish.kv_transfer is not None:
            hand_over(complete, finish.kv_transfer)
        return response

    def embed_spec(self, request: pb.EmbedRequest) -> EmbedSpec:
        if not request.HasField("tokenized"):
            raise InvalidArgument("tokenized", "is required")
        return EmbedSpec(request.request_id, request.tokenized.input_ids)

    def embed_response(self, embedding: Embedding) -> pb.EmbedResponse:
        return pb.EmbedResponse(
            embedding=embedding.values,
            prompt_tokens=embedding.prompt_tokens,
            embedding_dim=len(embedding.values),
        )

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
            supports_vision=facts.supports_vision,
            served_model_name=facts.served_model_name,
            tokenizer_path=facts.tokenizer_path or "",
            model_type=facts.model_type or "",
            architectures=facts.architectures,
            eos_token_ids=facts.eos_token_ids,
            pad_token_id=facts.pad_token_id or 0,
            bos_token_id=facts.bos_token_id or 0,
            max_req_input_len=facts.max_prompt_tokens or facts.max_context_length or 0,
            default_sampling_params_json=config.default_sampling_json(facts.default_sampling),
        )

    def server_info(self, facts: ServerFacts, live: LiveFacts) -> pb.GetServerInfoResponse:
        pairing = facts.pairing or PairingFacts()
        return pb.GetServerInfoResponse(
            active_requests=live.active_requests,
            is_paused=facts.is_paused,
            last_receive_timestamp=live.last_receive_at or 0.0,
            uptime_seconds=live.uptime_seconds,
            server_type=facts.server_type,
            data_parallel_size=facts.data_parallel_size or 0,
            block_size=facts.block_size or 0,
            max_num_seqs=facts.max_running_requests or 0,
            kv_connector=pairing.kv_connector,
            kv_role=pairing.kv_role,
            kv_engine_id=pairing.kv_engine_id,
            kv_cache_dtype=pairing.kv_cache_dtype,
            attention_backend=pairing.attention_backend,
            model_dtype=pairing.model_dtype,
            pairing_protocol=pairing.pairing_protocol,
            multimodal_encoder_dtype=pairing.encoder_dtype,
            shm_namespace_id=pairing.shm_namespace_id,
            engine_reasoning_parser=pairing.reasoning_parser,
            constrained_decoding_start=pairing.constraint_start,
        )

    def loads_response(
        self, request: pb.GetLoadsRequest, loads: Sequence[Load], version: str
    ) -> pb.GetLoadsResponse:
        """Core figures only: the proto has no section for anything else."""
        chosen = reports.selected(request, loads)
        return pb.GetLoadsResponse(
            timestamp=reports.now(),
            version=version,
            dp_rank_count=len(chosen),
            loads=[
                # vLLM has one figure for both: the share of KV blocks in use.
                pb.SchedulerLoad(**reports.known(load), utilization=load.token_usage or 0.0)
                for load in chosen
            ],
        )


def _read(sent: pb.SamplingParams) -> tuple[Sampling, LogprobSpec]:
    logprobs = LogprobSpec(
        output=sent.logprobs if sent.HasField("logprobs") else None,
        prompt=sent.prompt_logprobs if sent.HasField("prompt_logprobs") else None,
    )
    return sampling(sent), logprobs


@lru_cache(256)
def _seen(sent: bytes) -> tuple[Sampling, LogprobSpec]:
    """An application asks for the same again and again."""
    return _read(pb.SamplingParams.FromString(sent))


def sampling(sent: pb.SamplingParams) -> Sampling:
    return Sampling(
        temperature=sent.temperature if sent.HasField("temperature") else None,
        top_p=sent.top_p or None,
        top_k=sent.top_k or None,
        min_p=sent.min_p or None,
        frequency_penalty=sent.frequency_penalty or None,
        presence_penalty=sent.presence_penalty or None,
        repetition_penalty=sent.repetition_penalty or None,
        max_tokens=sent.max_tokens if sent.HasField("max_tokens") else None,
        min_tokens=sent.min_tokens or None,
        stop=tuple(sent.stop),
        stop_token_ids=tuple(sent.stop_token_ids),
        ignore_eos=sent.ignore_eos,
        skip_special_tokens=sent.skip_special_tokens,
        spaces_between_special_tokens=sent.spaces_between_special_tokens,
        include_stop=sent.include_stop_str_in_output,
        n=sent.n or 1,
        seed=sent.seed if sent.HasField("seed") else None,
        logit_bias=dict(sent.logit_bias),
        constraint=constraint(sent),
    )


def constraint(sent: pb.SamplingParams) -> Constraint | None:
    """What the output must look like; an empty one, and `json_object=false`, ask for nothing."""
    kind = sent.WhichOneof("constraint")
    if kind is None:
        return None
    value: str | tuple[str, ...]
    if kind == "json_object":
        asked, value = sent.json_object, ""
    else:
        value = tuple(sent.choice.choices) if kind == "choice" else getattr(sent, kind)
        asked = bool(value)
    return Constraint(kind, value, sent.grammar_from_first_token) if asked else None


def kv_transfer(request: pb.GenerateRequest) -> KvTransfer | None:
    """The connector's parameters; the typed message is read only where there is no JSON.

    :raises InvalidArgument: naming the field.
    """
    if request.HasField("kv_transfer_params_json"):
        text = request.kv_transfer_params_json
        return (
            KvTransfer(params_json=text) if json_object("kv_transfer_params_json", text) else None
        )
    if not request.HasField("kv_transfer_params"):
        return None
    host, port = request.kv_transfer_params.remote_host, request.kv_transfer_params.remote_port
    if not host:
        raise InvalidArgument("kv_transfer_params.remote_host", "must not be empty")
    if not 1 <= port <= 65535:
        raise InvalidArgument("kv_transfer_params.remote_port", f"must be a port, got {port}")
    return KvTransfer(host=host, port=port)


def hand_over(complete: pb.GenerateComplete, kv: KvTransfer) -> None:
    """What the decode side needs, in both forms the proto has.

    Text that is no JSON object is left out with a warning: decode then computes the prompt itself.
    """
    host: object = kv.host
    port: object = kv.port
    if kv.params_json is not None:
        try:
            params = json_object("kv_transfer_params_json", kv.params_json)
        except InvalidArgument as error:
            log.warning("the engine's KV-transfer parameters were not sent on: %s", error.reason)
            return
        complete.kv_transfer_params_json = kv.params_json
        host, port = params.get("remote_host"), params.get("remote_port")
    if isinstance(host, str) and host and type(port) is int and 1 <= port <= 65535:
        complete.kv_transfer_params.remote_host = host
        complete.kv_transfer_params.remote_port = port
