"""A `VllmConfig` of the right shape without vLLM: what the adapter reads, changeable by path."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any


def vllm_config(**changes: Any) -> Any:
    """`vllm_config(cache_config__block_size=32)`: two underscores where a path has a dot."""
    hf = SimpleNamespace(
        model_type="qwen3", eos_token_id=[2, 3], bos_token_id=1, pad_token_id=0, text_config=None
    )
    model = SimpleNamespace(
        model="/models/tiny",
        tokenizer="/models/tiny-tokenizer",
        served_model_name=["tiny", "small"],
        runner_type="generate",
        max_model_len=256,
        max_logprobs=20,
        is_multimodal_model=False,
        enforce_eager=False,
        is_encoder_decoder=False,
        hf_config=hf,
        architectures=["Qwen3ForCausalLM"],
        dtype="torch.bfloat16",
        get_vocab_size=lambda: 1000,
        get_diff_sampling_param=dict,
        try_get_generation_config=dict,
        multimodal_config=None,
        pooler_config=None,
        tokenizer_revision=None,
    )
    config = SimpleNamespace(
        model_config=model,
        cache_config=SimpleNamespace(block_size=16, num_gpu_blocks=100, cache_dtype="auto"),
        scheduler_config=SimpleNamespace(max_num_seqs=8, max_num_batched_tokens=64),
        device_config=SimpleNamespace(device_type="cpu"),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=[]),
        parallel_config=SimpleNamespace(
            data_parallel_size=1,
            data_parallel_size_local=1,
            data_parallel_index=0,
            local_engines_only=False,
        ),
        attention_config=SimpleNamespace(backend=None),
        structured_outputs_config=SimpleNamespace(
            reasoning_parser="", enable_in_reasoning=False, backend="auto"
        ),
        observability_config=SimpleNamespace(otlp_traces_endpoint=None),
        profiler_config=SimpleNamespace(profiler=None),
        kv_transfer_config=None,
        kv_events_config=None,
    )
    for path, value in changes.items():
        *way, last = path.split("__")
        target: Any = config
        for name in way:
            target = getattr(target, name)
        setattr(target, last, value)
    return config


def kv_config(connector: str | None = "NixlConnector", **more: Any) -> Any:
    """A `KVTransferConfig`."""
    fields = {"kv_role": "kv_both", "engine_id": "e-1", "kv_connector_extra_config": {}} | more
    return SimpleNamespace(kv_connector=connector, **fields)
