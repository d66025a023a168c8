"""What the Rust server is told of the model and the engine, as keywords of its constructor.

The same facts as the Python servicer's (`facts`, `pairing`), read once from one `VllmConfig`. What
is unknown is left out: the binding has defaults for it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.types import ModelFacts
from smg_grpc_servicer.rust.plan import Keyword
from smg_grpc_servicer.vllm.facts import item_limits, model_facts, stop_ids
from smg_grpc_servicer.vllm.media_options import PROCESSOR, SMG, MediaOptions, smg_pipeline
from smg_grpc_servicer.vllm.pairing import pairing_facts
from smg_grpc_servicer.vllm.probe import positive, probe, text


@dataclass(frozen=True, slots=True)
class Facts:
    """Facts of one launch."""

    model: ModelFacts
    keywords: Mapping[str, Keyword]

    @classmethod
    def of(
        cls,
        vllm_config: Any,
        *,
        log_stats: bool,
        media: MediaOptions | None = None,
        tokenizer_dir: Path | None = None,
    ) -> Facts:
        """:raises ConfigError: `--mm-processor smg` without what it reads the model from."""
        limits = item_limits(vllm_config)
        model = model_facts(vllm_config, media=bool(limits))
        keywords = _model(vllm_config, model) | _server(vllm_config, limits)
        keywords |= _kv_events(vllm_config)
        keywords["log_stats"] = Keyword(log_stats)
        if media is not None and media.processor == SMG:
            keywords["smg_media_processor"] = Keyword(
                _pipeline(vllm_config, model, media, limits, tokenizer_dir),
                asked=PROCESSOR.flag,
            )
        return cls(model, keywords)


def _model(vllm_config: Any, model: ModelFacts) -> dict[str, Keyword]:
    ids = stop_ids(vllm_config.model_config, model)
    sampling = dict(model.default_sampling)
    return {
        "served_model_name": Keyword(model.served_model_name, required=True),
        "tokenizer_path": Keyword(model.tokenizer_path),
        "is_generation": Keyword(model.is_generation, required=True),
        "max_context_length": Keyword(model.max_context_length, required=True),
        "vocab_size": Keyword(model.vocab_size),
        "supports_vision": Keyword(model.supports_vision),
        "model_type": Keyword(model.model_type),
        "architectures": Keyword(list(model.architectures) or None),
        "eos_token_ids": Keyword(list(ids) or None, required=True),
        "pad_token_id": Keyword(model.pad_token_id),
        "bos_token_id": Keyword(model.bos_token_id),
        "default_sampling_params_json": Keyword(
            json.dumps(sampling, separators=(",", ":"), allow_nan=False) if sampling else None,
            required=True,
        ),
    }


def _server(vllm_config: Any, limits: Mapping[str, int]) -> dict[str, Keyword]:
    pairing = pairing_facts(vllm_config)
    normalizes = probe(vllm_config.model_config, "multimodal_config.mm_device_do_normalize")
    shown = ",".join(f"{kind}={count}" for kind, count in sorted(limits.items()))
    activation = probe(vllm_config.model_config, "pooler_config.use_activation")
    return {
        "data_parallel_size": Keyword(
            vllm_config.parallel_config.data_parallel_size, required=True
        ),
        "max_num_seqs": Keyword(positive(vllm_config, "scheduler_config.max_num_seqs")),
        "block_size": Keyword(positive(vllm_config, "cache_config.block_size")),
        "kv_connector": Keyword(pairing.kv_connector),
        "kv_role": Keyword(pairing.kv_role),
        "kv_engine_id": Keyword(pairing.kv_engine_id),
        "kv_cache_dtype": Keyword(pairing.kv_cache_dtype),
        "attention_backend": Keyword(pairing.attention_backend),
        "model_dtype": Keyword(pairing.model_dtype),
        "pairing_protocol": Keyword(pairing.pairing_protocol),
        "shm_namespace_id": Keyword(pairing.shm_namespace_id),
        "engine_reasoning_parser": Keyword(pairing.reasoning_parser),
        "constrained_decoding_start": Keyword(pairing.constraint_start),
        "structured_outputs_backend": Keyword(
            text(vllm_config, "structured_outputs_config.backend")
        ),
        "pooler_use_activation": Keyword(activation if isinstance(activation, bool) else None),
        "pooler_dimensions": Keyword(
            positive(vllm_config.model_config, "pooler_config.dimensions")
        ),
        "mm_device_do_normalize": Keyword(normalizes if isinstance(normalizes, bool) else None),
        "mm_item_limits": Keyword(shown or None),
    }


def _kv_events(vllm_config: Any) -> dict[str, Keyword]:
    """Where the server's relay subscribes; nothing without a publisher that it can reach."""
    config: Any = probe(vllm_config, "kv_events_config")
    if config is None or not config.enable_kv_cache_events or config.publisher != "zmq":
        return {}
    return {
        "kv_events_endpoint": Keyword(config.endpoint),
        "kv_events_replay_endpoint": Keyword(
            config.replay_endpoint if config.buffer_steps else None
        ),
        "kv_events_topic": Keyword(config.topic or None),
    }


def _pipeline(
    vllm_config: Any,
    model: ModelFacts,
    media: MediaOptions,
    limits: Mapping[str, int],
    tokenizer_dir: Path | None,
) -> dict[str, object]:
    if not limits:
        raise ConfigError(f"{PROCESSOR.flag}: got {SMG!r}, but this model takes no media")
    if tokenizer_dir is None:
        raise ConfigError(
            f"{PROCESSOR.flag}: got {SMG!r}, which reads the model's configuration from its "
            f"tokenizer's directory, and there is none for {model.tokenizer_path!r} on this host"
        )
    config: Any = probe(vllm_config.model_config, "multimodal_config")
    options = dict(probe(config, "mm_processor_kwargs") or {})  # type: ignore[call-overload]
    options.pop("device", None)
    return smg_pipeline(
        media,
        model_dir=str(tokenizer_dir),
        model_id=model.model_path,
        raw_pixels=bool(probe(config, "mm_device_do_normalize")),
        encoder_dtype=(model.dtype or "").removeprefix("torch."),
        processor_kwargs_json=json.dumps(options) if options else None,
        item_limits=limits,
        # No probe: a field that vLLM has moved must not open the way to every host.
        allowed_domains=vllm_config.model_config.allowed_media_domains,
    )
