"""Facts as answers: the protos call the same things by the same names, where they have them."""

from __future__ import annotations

from typing import Any

from smg_grpc_servicer.core import facts as config
from smg_grpc_servicer.core.types import ModelFacts

Message = Any


def filled(make: Any, **known: object) -> Message:
    """A message with all that is known and its proto has a field for; None is unknown."""
    fields = make.DESCRIPTOR.fields_by_name
    return make(**{name: value for name, value in known.items() if name in fields})


def model_info(make: Any, facts: ModelFacts) -> Message:
    """A GetModelInfoResponse of any of the protos."""
    return filled(
        make,
        model_path=facts.model_path,
        tokenizer_path=facts.tokenizer_path,
        served_model_name=facts.served_model_name,
        is_generation=facts.is_generation,
        weight_version=facts.weight_version,
        max_context_length=facts.max_context_length,
        max_req_input_len=facts.max_prompt_tokens or facts.max_context_length,
        vocab_size=facts.vocab_size,
        supports_vision=facts.supports_vision,
        supports_multimodal=facts.supports_vision,
        model_type=facts.model_type,
        model_dtype=(facts.dtype or "").removeprefix("torch."),
        architectures=facts.architectures,
        eos_token_ids=facts.eos_token_ids,
        pad_token_id=facts.pad_token_id,
        bos_token_id=facts.bos_token_id,
        default_sampling_params_json=config.default_sampling_json(facts.default_sampling),
        preferred_sampling_params=config.json_text(facts.preferred_sampling),
        id2label_json=config.json_text(facts.labels),
        num_labels=len(facts.labels),
    )
