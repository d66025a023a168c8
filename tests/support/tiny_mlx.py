"""A tiny random Llama in a directory that `mlx_lm.load` accepts, the same on every machine.

The weights are noise from a fixed seed: greedy output is arbitrary but repeatable, and sampling
differs from seed to seed, which a trained model's peaked distribution would hide.
"""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

SENTENCES = (
    "The quick brown fox jumps over the lazy dog.",
    "A servicer answers requests and streams tokens back to the caller.",
    "What does the function return when the list is empty?",
    "Numbers such as 0 1 2 3 4 5 6 7 8 9 are tokens as well, and so are (brackets).",
    "Hello there! How are you today? I am a small model and I like to talk.",
)

CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def write_tiny_model(
    path: Path,
    *,
    hidden: int = 64,
    layers: int = 2,
    heads: int = 4,
    kv_heads: int = 2,
    vocab: int = 512,
    ctx: int = 1024,
    seed: int = 0,
    scale: float = 4.0,
    dtype: str = "float32",
) -> Path:
    """Write config, weights and tokenizer into `path`; `scale` sharpens the logits."""
    import mlx.core as mx
    from mlx.utils import tree_flatten, tree_map
    from mlx_lm.models import llama

    path.mkdir(parents=True, exist_ok=True)
    config: dict[str, Any] = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": hidden * 2,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "rms_norm_eps": 1e-5,
        "vocab_size": vocab,
        "max_position_embeddings": ctx,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": dtype,
    }
    (path / "config.json").write_text(json.dumps(config, indent=1))
    mx.random.seed(seed)
    model: Any = llama.Model(llama.ModelArgs.from_dict(config))
    model.update(tree_map(partial(_noise, scale), _weights(model)))
    model.set_dtype(getattr(mx, dtype))
    mx.save_safetensors(
        str(path / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    _write_tokenizer(path, vocab)
    return path


def _noise(scale: float, weight: Any) -> Any:
    import mlx.core as mx

    return mx.random.normal(weight.shape) * (scale / weight.shape[-1] ** 0.5)


def _weights(model: Any) -> Any:
    """The matrices to randomise; norms stay at one."""
    from mlx.utils import tree_flatten, tree_unflatten

    return tree_unflatten([(k, v) for k, v in tree_flatten(model.parameters()) if v.ndim > 1])


def _write_tokenizer(path: Path, vocab: int) -> None:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    special = ["<unk>", "<s>", "</s>", "<|im_start|>", "<|im_end|>"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(SENTENCES, trainer)
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "tokenizer_class": "PreTrainedTokenizerFast",
                "bos_token": "<s>",
                "eos_token": "</s>",
                "unk_token": "<unk>",
                "model_max_length": 1 << 30,
                "chat_template": CHAT_TEMPLATE,
            },
            indent=1,
        )
    )
