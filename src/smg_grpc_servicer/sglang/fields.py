"""Which field of `sglang_scheduler.proto` became what; a test walks the descriptors against this.

Paths start with the message's name. A path stands for everything below it.
"""

from __future__ import annotations

from collections.abc import Mapping

from smg_grpc_servicer.core.types import Feature
from smg_grpc_servicer.core.wire_parts import Refusals

RAW_MEDIA = "raw media (send preprocessed tensors)"

MAPPED: Mapping[str, str] = {
    "GenerateRequest.request_id": "request_id",
    "GenerateRequest.tokenized.input_ids": "prompt",
    "GenerateRequest.return_logprob": "logprobs.output",
    "GenerateRequest.logprob_start_len": "logprobs.prompt_start",
    "GenerateRequest.top_logprobs_num": "logprobs.output",
    "GenerateRequest.token_ids_logprob": "logprobs.token_ids",
    "GenerateRequest.disaggregated_params.bootstrap_host": "kv_transfer.host",
    "GenerateRequest.disaggregated_params.bootstrap_port": "kv_transfer.port",
    "GenerateRequest.disaggregated_params.bootstrap_room": "kv_transfer.room",
    "GenerateRequest.lora_id": "lora_id",
    "GenerateRequest.data_parallel_rank": "rank",
    "GenerateRequest.stream": "stream",
    "GenerateRequest.require_reasoning": "count_reasoning",
    "GenerateRequest.sampling_params.temperature": "sampling.temperature",
    "GenerateRequest.sampling_params.top_p": "sampling.top_p",
    "GenerateRequest.sampling_params.top_k": "sampling.top_k",
    "GenerateRequest.sampling_params.min_p": "sampling.min_p",
    "GenerateRequest.sampling_params.frequency_penalty": "sampling.frequency_penalty",
    "GenerateRequest.sampling_params.presence_penalty": "sampling.presence_penalty",
    "GenerateRequest.sampling_params.repetition_penalty": "sampling.repetition_penalty",
    "GenerateRequest.sampling_params.max_new_tokens": "sampling.max_tokens",
    "GenerateRequest.sampling_params.stop": "sampling.stop",
    "GenerateRequest.sampling_params.stop_token_ids": "sampling.stop_token_ids",
    "GenerateRequest.sampling_params.skip_special_tokens": "sampling.skip_special_tokens",
    "GenerateRequest.sampling_params.spaces_between_special_tokens": (
        "sampling.spaces_between_special_tokens"
    ),
    "GenerateRequest.sampling_params.regex": "sampling.constraint.value",
    "GenerateRequest.sampling_params.json_schema": "sampling.constraint.value",
    "GenerateRequest.sampling_params.ebnf_grammar": "sampling.constraint.value",
    "GenerateRequest.sampling_params.structural_tag": "sampling.constraint.value",
    "GenerateRequest.sampling_params.n": "sampling.n",
    "GenerateRequest.sampling_params.min_new_tokens": "sampling.min_tokens",
    "GenerateRequest.sampling_params.ignore_eos": "sampling.ignore_eos",
    "GenerateRequest.sampling_params.no_stop_trim": "sampling.include_stop",
    "GenerateRequest.sampling_params.stream_interval": "stream_interval",
    "GenerateRequest.sampling_params.logit_bias": "sampling.logit_bias",
    "GenerateRequest.sampling_params.custom_params": "custom_params",
    "GenerateRequest.custom_logit_processor": "logit_processor",
    "GenerateRequest.input_embeds": "input_embeds",
    "GenerateRequest.return_hidden_states": "hidden_states",
    "GenerateRequest.mm_inputs.pixel_values": "media.pixels.data",
    "GenerateRequest.mm_inputs.model_specific_tensors": "media.tensors",
    "GenerateRequest.mm_inputs.im_token_id": "media.token_id",
    "GenerateRequest.mm_inputs.mm_placeholders": "media.placeholders",
    "GenerateRequest.mm_inputs.modalities": "media.modality",
    "GenerateRequest.mm_inputs.image_urls": "references.images",
    "GenerateRequest.mm_inputs.video_urls": "references.videos",
    "GenerateRequest.mm_inputs.audio_urls": "references.audios",
    "EmbedRequest.token_type_ids": "token_type_ids",
    "EmbedRequest.request_id": "request_id",
    "EmbedRequest.tokenized.input_ids": "prompt",
    "EmbedRequest.data_parallel_rank": "rank",
    "AbortRequest.request_id": "",
    "LoadLoRAAdapterRequest.lora_name": "name",
    "LoadLoRAAdapterRequest.lora_path": "path",
    "LoadLoRAAdapterRequest.pinned": "pinned",
    "LoadLoRAAdapterRequest.lora_id": "id",
    "UnloadLoRAAdapterRequest.lora_name": "",
    "UnloadLoRAAdapterRequest.lora_id": "",
    "GetLoadsRequest.dp_rank": "",
    "GetLoadsRequest.include": "",
}
"""Request field to where it stands in the spec; "" where a call's whole answer depends on it."""

REFUSED = Refusals(
    {
        "EmbedRequest.mm_inputs": Feature.MEDIA,
        "EmbedRequest.texts": "cross-encoder requests as texts (send token ids)",
    }
)
"""What no part of the vocabulary carries: UNIMPLEMENTED, whatever engine is behind it."""

NOT_CARRIED = frozenset({Feature.MEDIA})
"""Features above: an embedding's media."""

IGNORED: Mapping[str, str] = {
    "GenerateRequest.tokenized.original_text": "for reference; the ids are the prompt",
    "GenerateRequest.timestamp": "the sender's clock; times are taken on arrival here",
    "GenerateRequest.log_metrics": "metrics are the server's, not a request's",
    "GenerateRequest.mm_inputs.image_data": "what the tensors were made of; alone it is refused",
    "GenerateRequest.mm_inputs.video_data": "what the tensors were made of; alone it is refused",
    "GenerateRequest.mm_inputs.audio_data": "what the tensors were made of; alone it is refused",
    "EmbedRequest.is_cross_encoder": "the model is one or is not; its score is a vector of one",
    "EmbedRequest.tokenized.original_text": "for reference; the ids are the prompt",
    "EmbedRequest.sampling_params": "there for compatibility; nothing is sampled",
    "AbortRequest.reason": "the sender's remark",
}
"""Request field to the reason why it changes nothing."""

NOT_FILLED: Mapping[str, str] = {
    "GenerateResponse.chunk.hidden_states": "all of them stand in the complete",
    "GenerateResponse.complete.all_hidden_states.layer": "the last one's",
    "LoadLoRAAdapterResponse": "made by the call itself (adapter_calls.py)",
    "UnloadLoRAAdapterResponse": "made by the call itself (adapter_calls.py)",
    "ListLoadedLoRAAdaptersResponse": "made by the call itself (adapter_calls.py)",
}
"""Response field to the reason why it stays at the proto's default, which reads as unknown."""
