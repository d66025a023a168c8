"""Which field of `tokenspeed_scheduler.proto` became what; a test walks the descriptors by this.

Paths start with the message's name. A path stands for everything below it.
"""

from __future__ import annotations

from collections.abc import Mapping

from smg_grpc_servicer.core.types import Feature
from smg_grpc_servicer.core.wire_parts import Refusals

MAPPED: Mapping[str, str] = {
    "GenerateRequest.request_id": "request_id",
    "GenerateRequest.tokenized.input_ids": "prompt",
    "GenerateRequest.return_logprob": "logprobs.output",
    "GenerateRequest.top_logprobs_num": "logprobs.output",
    "GenerateRequest.stream": "stream",
    "GenerateRequest.kv_bootstrap_info.bootstrap_host": "kv_transfer.host",
    "GenerateRequest.kv_bootstrap_info.bootstrap_port": "kv_transfer.port",
    "GenerateRequest.kv_bootstrap_info.bootstrap_room": "kv_transfer.room",
    "GenerateRequest.data_parallel_rank": "rank",
    "GenerateRequest.sampling_params.temperature": "sampling.temperature",
    "GenerateRequest.sampling_params.top_p": "sampling.top_p",
    "GenerateRequest.sampling_params.top_k": "sampling.top_k",
    "GenerateRequest.sampling_params.min_p": "sampling.min_p",
    "GenerateRequest.sampling_params.frequency_penalty": "sampling.frequency_penalty",
    "GenerateRequest.sampling_params.presence_penalty": "sampling.presence_penalty",
    "GenerateRequest.sampling_params.repetition_penalty": "sampling.repetition_penalty",
    "GenerateRequest.sampling_params.max_new_tokens": "sampling.max_tokens",
    "GenerateRequest.sampling_params.min_new_tokens": "sampling.min_tokens",
    "GenerateRequest.sampling_params.stop": "sampling.stop",
    "GenerateRequest.sampling_params.stop_token_ids": "sampling.stop_token_ids",
    "GenerateRequest.sampling_params.ignore_eos": "sampling.ignore_eos",
    "GenerateRequest.sampling_params.skip_special_tokens": "sampling.skip_special_tokens",
    "GenerateRequest.sampling_params.spaces_between_special_tokens": (
        "sampling.spaces_between_special_tokens"
    ),
    "GenerateRequest.sampling_params.n": "sampling.n",
    "GenerateRequest.sampling_params.logit_bias": "sampling.logit_bias",
    "GenerateRequest.sampling_params.regex": "sampling.constraint.value",
    "GenerateRequest.sampling_params.json_schema": "sampling.constraint.value",
    "GenerateRequest.sampling_params.ebnf_grammar": "sampling.constraint.value",
    "GenerateRequest.sampling_params.structural_tag": "sampling.constraint.value",
    "GenerateRequest.sampling_params.no_stop_trim": "sampling.include_stop",
    "GenerateRequest.sampling_params.sampling_seed": "sampling.seed",
    "AbortRequest.request_id": "",
    "GetLoadsRequest.dp_rank": "",
}
"""Request field to where it stands in the spec; "" where a call's whole answer depends on it."""

REFUSED_ALWAYS = Refusals(
    {
        "GenerateRequest.mm_inputs": Feature.MEDIA,
        "GenerateRequest.encode_bootstrap_info": Feature.MEDIA,
        "GenerateRequest.sampling_params.custom_params": Feature.CUSTOM_PARAMS,
    }
)

REFUSED: Mapping[str, Feature | str] = {
    **REFUSED_ALWAYS,
    # With return_logprob, and a start that is not -1; without it they ask for nothing.
    "GenerateRequest.logprob_start_len": Feature.PROMPT_LOGPROBS,
    "GenerateRequest.token_ids_logprob": Feature.TOKEN_LOGPROBS,
}
"""What no part of the vocabulary or of an answer carries: UNIMPLEMENTED, whatever the engine."""

NOT_CARRIED = frozenset(
    {
        Feature.MEDIA,
        Feature.CUSTOM_PARAMS,
        Feature.PROMPT_LOGPROBS,
        Feature.TOKEN_LOGPROBS,
    }
)
"""Features above: media waits for the tensor room, custom parameters for a typed field in
`GenerateSpec`; the proto's answers have no field for either kind of rows."""

IGNORED: Mapping[str, str] = {
    "GenerateRequest.tokenized.original_text": "for logs; the ids are the prompt",
    "AbortRequest.reason": "the sender's remark",
    "GetLoadsRequest.include": "core figures always go out and there are no others",
}
"""Request field to the reason why it changes nothing."""

NOT_FILLED: Mapping[str, str] = {
    "GetModelInfoResponse.supported_modalities": "not in ModelFacts",
    "GetModelInfoResponse.multimodal_encoder_dtype": "not in ModelFacts",
    "GetServerInfoResponse.constrained_decoding": "not in ServerFacts",
    "GetLoadsResponse.loads.utilization": "not in Load",
    "GetLoadsResponse.loads.memory": "not in Load",
    "GetLoadsResponse.loads.queues": "not in Load",
    "GetLoadsResponse.aggregate.avg_utilization": "not in Load",
}
"""Response field to the reason why it stays at the proto's default, which reads as unknown."""
