"""Tiny random models for SGLang on a CPU: `python -m tests.support.tiny_sglang KIND DIR …`.

`llama` and `qwen3`, and `adapter`: a LoRA adapter for the Llama. The weights are noise from a fixed
seed, large enough that greedy output does not hang on rounding.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.tiny_vllm import VOCAB, write_tiny_qwen3, write_tokenizer

CONTEXT = 1024
HIDDEN = 64


def write_tiny_llama(path: Path, *, seed: int = 0) -> Path:
    """Config, weights and tokenizer into `path`."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(path)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        initializer_range=0.1,
        dtype="float32",
    )
    torch.manual_seed(seed)
    LlamaForCausalLM(config).save_pretrained(path, safe_serialization=True)
    (path / "generation_config.json").write_text(
        json.dumps(
            {
                "bos_token_id": ids["<|endoftext|>"],
                "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
                "do_sample": True,
                "temperature": 0.7,
                "top_k": 20,
                "top_p": 0.95,
            }
        )
    )
    return path


def write_adapter(path: Path, *, seed: int = 1) -> Path:
    """A LoRA adapter of rank 8 for the query and value projections of the Llama."""
    import torch
    from safetensors.torch import save_file

    path.mkdir(parents=True, exist_ok=True)
    generator = torch.Generator().manual_seed(seed)
    weights: dict[str, Any] = {}
    for layer in range(2):
        for name, rows in (("q_proj", HIDDEN), ("v_proj", 32)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            for part, shape in (("lora_A", (8, HIDDEN)), ("lora_B", (rows, 8))):
                weights[f"{prefix}.{part}.weight"] = torch.randn(shape, generator=generator)
    save_file(weights, str(path / "adapter_model.safetensors"))
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": 8,
        "lora_alpha": 16,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": ["q_proj", "v_proj"],
        "base_model_name_or_path": "tiny",
    }
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


WRITERS = {"llama": write_tiny_llama, "qwen3": write_tiny_qwen3, "adapter": write_adapter}

if __name__ == "__main__":
    for kind, folder in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        WRITERS[kind](Path(folder))
