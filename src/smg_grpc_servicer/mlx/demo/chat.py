"""The demo model's chat format (ChatML) and the tokenizer files that carry it.

`render` and `TEMPLATE` say the same thing, one for training and one for whoever serves the model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

END_OF_TEXT, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL_TOKENS = (END_OF_TEXT, START, END)
TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
ASSISTANT = f"{START}assistant\n"


def render(role: str, text: str) -> str:
    return f"{START}{role}\n{text}{END}\n"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    """A byte-level BPE: every text has ids, whatever it was trained on."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


def save_tokenizer(tokenizer: Tokenizer, directory: Path, context: int) -> None:
    """Written by hand: what `save_pretrained` writes differs between transformers releases."""
    tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        "bos_token": END_OF_TEXT,
        "eos_token": END,
        "pad_token": END_OF_TEXT,
        "additional_special_tokens": [START],
        "clean_up_tokenization_spaces": False,
    }
    write_json(directory / "tokenizer_config.json", settings)
    (directory / "chat_template.jinja").write_text(TEMPLATE, encoding="utf-8")


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
