"""Tiny random Qwen3 models that vLLM's CPU engine serves, written without any network.

The weights are noise from a fixed seed: greedy output is arbitrary but repeatable. The head size is
one that vLLM's CPU attention has. Needs transformers and torch, which vLLM brings.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

VOCAB = 1024
SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
ADDED = ["<tool_call>", "</tool_call>", "<think>", "</think>"]
TEXT = (
    "the of and to in is was for on that with as by at from it this be are or which you your we "
    "can will has have not but they his her their one two three four five hello world weather city "
    "name arguments function tool call json true false null paris london tokyo what how many color "
    "red green blue dog cat house tree number string object array answer question please token"
)
WORDS = TEXT.split()


def text_of(seed: int, words: int) -> str:
    """Some of them in an order of its own."""
    return " ".join(random.Random(seed).choices(WORDS, k=words))


CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_qwen3(path: Path, *, seed: int = 0, embedding: bool = False) -> Path:
    """Config, weights, tokenizer and generation config into `path`.

    :param embedding: also the modules of a sentence-transformers model with last-token pooling.
    """
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    path.mkdir(parents=True, exist_ok=True)
    ids = write_tokenizer(path)
    config = Qwen3Config(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=4096,
        tie_word_embeddings=False,
        bos_token_id=ids["<|endoftext|>"],
        eos_token_id=ids["<|im_end|>"],
        pad_token_id=ids["<|endoftext|>"],
        dtype="bfloat16",
    )
    torch.manual_seed(seed)
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(path, safe_serialization=True)
    write_generation_config(path, ids)
    if embedding:
        _write_pooling(path)
    return path


def write_generation_config(path: Path, ids: dict[str, int]) -> None:
    """The model's own sampling."""
    write_json(
        path / "generation_config.json",
        {
            "bos_token_id": ids["<|endoftext|>"],
            "eos_token_id": [ids["<|im_end|>"], ids["<|endoftext|>"]],
            "pad_token_id": ids["<|endoftext|>"],
            "do_sample": True,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.95,
        },
    )


def write_tokenizer(path: Path, specials: Sequence[str] = SPECIALS) -> dict[str, int]:
    """A byte-level BPE of `VOCAB` entries; the ids of its special tokens."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB - len(specials) - len(ADDED),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_corpus(), trainer)
    tokenizer.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in specials])
    tokenizer.add_tokens([AddedToken(t, special=False, normalized=False) for t in ADDED])
    tokenizer.save(str(path / "tokenizer.json"))
    write_json(
        path / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "chat_template": CHAT_TEMPLATE,
            "eos_token": "<|im_end|>",
            "pad_token": "<|endoftext|>",
            "model_max_length": 4096,
            "clean_up_tokenization_spaces": False,
        },
    )
    assert tokenizer.get_vocab_size() <= VOCAB
    return {token: tokenizer.token_to_id(token) for token in [*specials, *ADDED]}


def _corpus() -> list[str]:
    """Sentences and JSON of a small vocabulary, the same each time."""
    chance = random.Random(0)
    lines = [" ".join(chance.choices(WORDS, k=12)) + chance.choice(".?!\n") for _ in range(2000)]
    lines += [json.dumps({chance.choice(WORDS): chance.randint(0, 9999)}) for _ in range(500)]
    return lines


def _write_pooling(path: Path) -> None:
    names = ("", "1_Pooling", "2_Normalize")
    kinds = ("Transformer", "Pooling", "Normalize")
    modules = [
        {"idx": at, "name": str(at), "path": name, "type": f"sentence_transformers.models.{kind}"}
        for at, (name, kind) in enumerate(zip(names, kinds, strict=True))
    ]
    (path / "modules.json").write_text(json.dumps(modules))
    (path / "1_Pooling").mkdir(exist_ok=True)
    write_json(
        path / "1_Pooling" / "config.json",
        {"word_embedding_dimension": 64, "pooling_mode_lasttoken": True, "include_prompt": True},
    )


def write_json(path: Path, content: dict[str, Any]) -> None:
    """`content` as a file."""
    path.write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    write_tiny_qwen3(Path(sys.argv[1]), embedding="--embedding" in sys.argv[2:])
