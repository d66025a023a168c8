"""Which field of `vllm_engine.proto` became what; a test walks the descriptors against this.

Paths start with the message's name. A path stands for everything below it.
"""

from __future__ import annotations

from collections.abc import Mapping

from smg_grpc_servicer.core.types import Feature
from smg_grpc_servicer.core.wire_parts import Refusals

MAPPED: Mapping[str, str] = {
    "GenerateRequest.request_id": "request_id",
    "GenerateRequest.tokenized.input_ids": "prompt",
    "GenerateRequest.text": "text",
    "GenerateRequest.stream": "stream",
    "GenerateRequest.kv_transfer_params.remote_host": "kv_transfer.host",
    "GenerateRequest.kv_transfer_params.remote_port": "kv_transfer.port",
    "GenerateRequest.kv_transfer_params_json": "kv_transfer.params_json",
    "GenerateRequest.data_parallel_rank": "rank",
    "GenerateRequest.sampling_params.truncate_prompt_tokens": "truncate_prompt",
    "GenerateRequest.sampling_params.temperature": "sampling.temperature",
    "GenerateRequest.sampling_params.top_p": "sampling.top_p",
    "GenerateRequest.sampling_params.top_k": "sampling.top_k",
    "GenerateRequest.sampling_params.min_p": "sampling.min_p",
    "GenerateRequest.sampling_params.frequency_penalty": "sampling.frequency_penalty",
    "GenerateRequest.sampling_params.presence_penalty": "sampling.presence_penalty",
    "GenerateRequest.sampling_params.repetition_penalty": "sampling.repetition_penalty",
    "GenerateRequest.sampling_params.max_tokens": "sampling.max_tokens",
    "GenerateRequest.sampling_params.min_tokens": "sampling.min_tokens",
    "GenerateRequest.sampling_params.stop": "sampling.stop",
    "GenerateRequest.sampling_params.stop_token_ids": "sampling.stop_token_ids",
    "GenerateRequest.sampling_params.skip_special_tokens": "sampling.skip_special_tokens",
    "GenerateRequest.sampling_params.spaces_between_special_tokens": (
        "sampling.spaces_between_special_tokens"
    ),
    "GenerateRequest.sampling_params.ignore_eos": "sampling.ignore_eos",
    "GenerateRequest.sampling_params.n": "sampling.n",
    "GenerateRequest.sampling_params.logprobs": "logprobs.output",
    "GenerateRequest.sampling_params.prompt_logprobs": "logprobs.prompt",
    "GenerateRequest.sampling_params.seed": "sampling.seed",
    "GenerateRequest.sampling_params.include_stop_str_in_output": "sampling.include_stop",
    "GenerateRequest.sampling_params.logit_bias": "sampling.logit_bias",
    "GenerateRequest.sampling_params.json_schema": "sampling.constraint.value",
    "GenerateRequest.sampling_params.regex": "sampling.constraint.value",
    "GenerateRequest.sampling_params.grammar": "sampling.constraint.value",
    "GenerateRequest.sampling_params.structural_tag": "sampling.constraint.value",
    "GenerateRequest.sampling_params.json_object": "sampling.constraint.kind",
    "GenerateRequest.sampling_params.choice.choices": "sampling.constraint.value",
    "GenerateRequest.sampling_params.grammar_from_first_token": (
        "sampling.constraint.from_first_token"
    ),
    "EmbedRequest.request_id": "request_id",
    "EmbedRequest.tokenized.input_ids": "prompt",
    "AbortRequest.request_ids": "",
    "GetLoadsRequest.dp_rank": "",
}
"""Request field to where it stands in the spec; "" where a call's whole answer depends on it."""

REFUSED = Refusals(
    {
        "GenerateRequest.mm_inputs": Feature.MEDIA,
        "GenerateRequest.extra_mm_inputs": Feature.MEDIA,
        "GenerateRequest.media_refs": Feature.MEDIA,
    }
)
"""What no part of the vocabulary carries: UNIMPLEMENTED, whatever engine is behind it."""

NOT_CARRIED = frozenset({Feature.MEDIA})
"""Features above: media waits for the tensor room."""

IGNORED: Mapping[str, str] = {
    "GenerateRequest.tokenized.original_text": "for reference; the ids are the prompt",
    "EmbedRequest.tokenized.original_text": "for reference; the ids are the prompt",
    "GetLoadsRequest.include": "the answer has core figures only",
}
"""Request field to the reason why it changes nothing."""

NOT_FILLED: Mapping[str, str] = {
    "GenerateResponse.complete.media_identity": "needs media",
    "GetServerInfoResponse.mm_processor": "needs media: it invites media references",
    "GetServerInfoResponse.mm_media_ref_schemes": "needs media",
    "GetServerInfoResponse.mm_processor_source": "needs media",
    "GetServerInfoResponse.mm_device_do_normalize": "needs media",
    "GetServerInfoResponse.mm_item_limits": "needs media",
    "GetServerInfoResponse.mm_encoder_budget": "needs media",
}
"""Response field to the reason why it stays at the proto's default, which reads as unknown."""
