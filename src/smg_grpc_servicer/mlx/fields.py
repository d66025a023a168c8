"""Which field of `mlx_engine.proto` became what; a test walks the descriptors against this.

Paths start with the message's name. A path stands for everything below it.
"""

from __future__ import annotations

from collections.abc import Mapping

from smg_grpc_servicer.core.types import Feature

MAPPED: Mapping[str, str] = {
    "GenerateRequest.request_id": "request_id",
    "GenerateRequest.tokenized.input_ids": "prompt",
    "GenerateRequest.text": "text",
    "GenerateRequest.stream": "stream",
    "GenerateRequest.sampling_params.temperature": "sampling.temperature",
    "GenerateRequest.sampling_params.top_p": "sampling.top_p",
    "GenerateRequest.sampling_params.top_k": "sampling.top_k",
    "GenerateRequest.sampling_params.min_p": "sampling.min_p",
    "GenerateRequest.sampling_params.repetition_penalty": "sampling.repetition_penalty",
    "GenerateRequest.sampling_params.frequency_penalty": "sampling.frequency_penalty",
    "GenerateRequest.sampling_params.presence_penalty": "sampling.presence_penalty",
    "GenerateRequest.sampling_params.logit_bias": "sampling.logit_bias",
    "GenerateRequest.sampling_params.max_tokens": "sampling.max_tokens",
    "GenerateRequest.sampling_params.stop_token_ids": "sampling.stop_token_ids",
    "GenerateRequest.sampling_params.ignore_eos": "sampling.ignore_eos",
    "GenerateRequest.sampling_params.logprobs": "logprobs.output",
    "GenerateRequest.sampling_params.seed": "sampling.seed",
    "AbortRequest.request_ids": "",
}
"""Request field to where it stands in the spec; "" where a call's whole answer depends on it."""

REFUSED: Mapping[str, Feature | str] = {}
"""What no part of the vocabulary carries: UNIMPLEMENTED, whatever engine is behind it."""

NOT_CARRIED: frozenset[Feature] = frozenset()
"""Features above."""

IGNORED: Mapping[str, str] = {
    "GenerateRequest.tokenized.original_text": "for reference; the ids are the prompt",
}
"""Request field to the reason why it changes nothing."""

NOT_FILLED: Mapping[str, str] = {}
"""Response field to the reason why it stays at the proto's default, which reads as unknown."""
