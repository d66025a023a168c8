"""`vllm.grpc.engine.VllmEngine`: proto to core and back.

Plain scalars cannot tell "unset" from zero: zero is off for all of them, as the published servicer
reads them; the flags are taken as sent. `temperature`, `max_tokens`, `logprobs`, `prompt_logprobs`,
`seed` and the rank carry presence. Source: `vllm_engine.proto` of smg-grpc-proto 0.4.28.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any, ClassVar

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.core import loads as reports
from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.loads import Load
from smg_grpc_servicer.core.types import (
    Constraint,
    Delta,
    EmbedSpec,
    Finish,
    GenerateSpec,
    KvTransfer,
    LogprobSpec,
    PairingFacts,
    Sampling,
    ServerFacts,
)
from smg_grpc_servicer.core.wire import Choice, LiveFacts, Wire
from smg_grpc_servicer.core.wire_parts import (
    fill_complete,
    fill_input,
    fill_output,
    given,
    json_object,
    refuse,
    scalars,
)
from smg_grpc_servicer.vllm.fields import REFUSED

log = logging.getLogger(__name__)

SMALL = 512
"""Bytes of sampling parameters that are worth being remembered."""


class VllmWire(Wire):
    """See the module."""

    service: ClassVar[str] = "vllm.grpc.engine.VllmEngine"
    proto: ClassVar[Any] = pb
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
            truncate_prompt=given(sent, "truncate_prompt_tokens"),
            sampling=asked,
            logprobs=logprobs,
            stream=request.stream,
            rank=given(request, "data_parallel_rank"),
            kv_transfer=kv_transfer(request),
        )

    def chunk(self, spec: GenerateSpec, choice: Choice, delta: Delta) -> pb.GenerateResponse:
        response, _ = choice.message(pb.GenerateResponse, delta)
        if delta.logprobs is not None:
            fill_output(response.chunk.output_logprobs, delta.token_ids, delta.logprobs)
        if delta.prompt_logprobs is not None:
            fill_input(response.chunk.input_logprobs, delta.prompt_logprobs)
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

    def server_info(self, facts: ServerFacts, live: LiveFacts) -> pb.GetServerInfoResponse:
        pairing = facts.pairing or PairingFacts()
        answer = pb.GetServerInfoResponse(
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
        answer.MergeFrom(super().server_info(facts, live))
        return answer

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
    logprobs = LogprobSpec(output=given(sent, "logprobs"), prompt=given(sent, "prompt_logprobs"))
    return sampling(sent), logprobs


@lru_cache(256)
def _seen(sent: bytes) -> tuple[Sampling, LogprobSpec]:
    """An application asks for the same again and again."""
    return _read(pb.SamplingParams.FromString(sent))


def sampling(sent: pb.SamplingParams) -> Sampling:
    return Sampling(
        **scalars(sent),
        max_tokens=given(sent, "max_tokens"),
        min_tokens=sent.min_tokens or None,
        stop=tuple(sent.stop),
        stop_token_ids=tuple(sent.stop_token_ids),
        ignore_eos=sent.ignore_eos,
        skip_special_tokens=sent.skip_special_tokens,
        spaces_between_special_tokens=sent.spaces_between_special_tokens,
        include_stop=sent.include_stop_str_in_output,
        n=sent.n or 1,
        seed=given(sent, "seed"),
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
