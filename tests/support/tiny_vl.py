"""A tiny random Qwen3-VL that vLLM's CPU engine serves, with the files its processors read.

Needs transformers and torch, as `tiny_vllm`, whose tokenizer it has, with the tokens of media.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from tests.support.tiny_vllm import (
    SPECIALS,
    VOCAB,
    write_generation_config,
    write_json,
    write_tokenizer,
)

VISION = ["<|vision_start|>", "<|vision_end|>", "<|vision_pad|>", "<|image_pad|>", "<|video_pad|>"]
PATCH, MERGE = 16, 2
"""Pixels of a patch's side; patches of a token's side."""
SMALLEST, LARGEST = 64 * 64, 256 * 256
"""Pixels of an image after it was resized."""


def write_tiny_qwen3_vl(path: Path, *, seed: int = 0) -> Path:
    """Config, weights, tokenizer and processor configs into `path`."""
    import torch
    from transformers import Qwen3VLConfig, Qwen3VLForConditionalGeneration

    path.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(path, [*SPECIALS, *VISION])
    config = Qwen3VLConfig(
        text_config=_text(ids),
        vision_config={
            "depth": 2,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_heads": 4,
            "patch_size": PATCH,
            "spatial_merge_size": MERGE,
            "temporal_patch_size": 2,
            "out_hidden_size": 64,
            "num_position_embeddings": 256,
            "deepstack_visual_indexes": [0, 1],
        },
        image_token_id=ids["<|image_pad|>"],
        video_token_id=ids["<|video_pad|>"],
        vision_start_token_id=ids["<|vision_start|>"],
        vision_end_token_id=ids["<|vision_end|>"],
        tie_word_embeddings=False,
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    model = Qwen3VLForConditionalGeneration(config).to(torch.bfloat16)
    model.save_pretrained(path, safe_serialization=True)
    write_generation_config(path, ids)
    _write_processors(path)
    return path


def _text(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 4096,
        "tie_word_embeddings": False,
        "bos_token_id": ids["<|endoftext|>"],
        "eos_token_id": ids["<|im_end|>"],
        "pad_token_id": ids["<|endoftext|>"],
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 5e6,
            "mrope_section": [6, 5, 5],
            "mrope_interleaved": True,
        },
    }


def _write_processors(path: Path) -> None:
    common = {
        "processor_class": "Qwen3VLProcessor",
        "do_resize": True,
        "do_rescale": True,
        "do_normalize": True,
        "do_convert_rgb": True,
        "resample": 3,
        "rescale_factor": 1 / 255,
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "patch_size": PATCH,
        "temporal_patch_size": 2,
        "merge_size": MERGE,
        "size": {"shortest_edge": SMALLEST, "longest_edge": LARGEST},
    }
    write_json(
        path / "preprocessor_config.json",
        common | {"image_processor_type": "Qwen2VLImageProcessor"},
    )
    write_json(
        path / "video_preprocessor_config.json",
        common
        | {
            "video_processor_type": "Qwen3VLVideoProcessor",
            "do_sample_frames": True,
            "fps": 2,
            "min_frames": 4,
            "max_frames": 16,
        },
    )


if __name__ == "__main__":
    write_tiny_qwen3_vl(Path(sys.argv[1]))
