"""Trains the demo model, a Llama of under a million parameters, and writes it for `mlx_lm.load`.

Importing this imports mlx. Loss is the mean cross-entropy, in nats, of the answers' tokens.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import mlx.optimizers as optim
from mlx import nn
from mlx.utils import tree_flatten
from mlx_lm.models import llama

from .chat import (
    END,
    END_OF_TEXT,
    SPECIAL_TOKENS,
    render,
    save_tokenizer,
    train_tokenizer,
    write_json,
)
from .corpus import Corpus
from .lessons import Lessons

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True, slots=True)
class Shape:
    """0.87 million parameters: 1.7 MB in float16."""

    vocabulary: int = 1024
    hidden: int = 128
    inner: int = 352
    layers: int = 4
    heads: int = 4
    kv_heads: int = 2
    context: int = 2048

    def config(self, tokenizer: Tokenizer) -> dict[str, Any]:
        ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "hidden_size": self.hidden,
            "intermediate_size": self.inner,
            "num_hidden_layers": self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.hidden // self.heads,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "hidden_act": "silu",
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": ids[END_OF_TEXT],
            "pad_token_id": ids[END_OF_TEXT],
            "eos_token_id": [ids[END], ids[END_OF_TEXT]],
            "torch_dtype": "float16",
        }


@dataclass(frozen=True, slots=True)
class Plan:
    """How long to train (`steps`, or else `seconds`) and at which pace."""

    seconds: float
    steps: int | None
    seed: int
    rate: float = 4e-3
    warmup_steps: int = 50
    layouts: tuple[tuple[int, int], ...] = ((16, 96),) * 5 + ((8, 192),) * 4 + ((2, 640),)
    """(rows, tokens in a row) of a batch; long rows teach long conversations"""

    def progress(self, step: int, elapsed: float) -> float:
        """0 at the start, 1 or more when done."""
        if self.steps is not None:
            return step / self.steps if self.steps > 0 else 1.0
        return elapsed / self.seconds if self.seconds > 0 else 1.0

    def rate_at(self, step: int, progress: float) -> float:
        warm = min(1.0, (step + 1) / self.warmup_steps)
        return self.rate * warm * (0.01 + 0.99 * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0))))


@dataclass(frozen=True, slots=True)
class Step:
    number: int
    progress: float
    loss: float
    """smoothed over about 50 steps"""
    tokens: int
    elapsed: float

    def __str__(self) -> str:
        rate = self.tokens / max(self.elapsed, 1e-9)
        return f"{self.elapsed:.0f} s, step {self.number}, loss {self.loss:.4f}, {rate:.0f} tok/s"


class Trainer:
    """Builds everything from the seed; `run` trains, `save` writes what there is by then."""

    def __init__(self, plan: Plan, shape: Shape | None = None) -> None:
        mx.random.seed(plan.seed)
        self._plan = plan
        self._shape = shape or Shape()
        answers = Corpus.read().answers()
        texts = [
            render("user", q) + render("assistant", a.text) for a in answers for q in a.questions
        ]
        self._tokenizer = train_tokenizer(texts, self._shape.vocabulary)
        self._config = self._shape.config(self._tokenizer)
        self._lessons = Lessons(answers, self._tokenizer, random.Random(plan.seed))
        self._model = llama.Model(llama.ModelArgs.from_dict(self._config))
        mx.eval(self._model.parameters())

    @property
    def parameters(self) -> int:
        return sum(int(value.size) for _, value in tree_flatten(self._model.parameters()))

    def run(self) -> Iterator[Step]:
        """Trains the model in place, one yield per step."""
        plan, model = self._plan, self._model
        optimizer = optim.AdamW(learning_rate=plan.rate, betas=[0.9, 0.98], weight_decay=0.01)
        value_and_grad = nn.value_and_grad(model, _loss)
        rng = random.Random(plan.seed)
        started, step, tokens, smooth = time.monotonic(), 0, 0, 0.0
        while (done := plan.progress(step, time.monotonic() - started)) < 1.0:
            rows, length = rng.choice(plan.layouts)
            batch = self._lessons.batch(rows, length)
            optimizer.learning_rate = plan.rate_at(step, done)
            ids, weights = mx.array(batch.ids), mx.array(batch.weights)
            (_, answers), grads = value_and_grad(model, ids, weights)
            grads, _ = optim.clip_grad_norm(grads, 1.0)
            optimizer.update(model, grads)
            mx.eval(model.parameters(), optimizer.state, answers)
            loss = float(answers.item())
            smooth = loss if step == 0 else 0.98 * smooth + 0.02 * loss
            step, tokens = step + 1, tokens + rows * length
            yield Step(step, done, smooth, tokens, time.monotonic() - started)

    def save(self, directory: Path) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        half = {k: v.astype(mx.float16) for k, v in tree_flatten(self._model.parameters())}
        mx.save_safetensors(str(directory / "model.safetensors"), half, metadata={"format": "mlx"})
        write_json(directory / "config.json", self._config)
        ends = {key: self._config[key] for key in ("bos_token_id", "pad_token_id", "eos_token_id")}
        write_json(directory / "generation_config.json", {**ends, "do_sample": False})
        save_tokenizer(self._tokenizer, directory, self._shape.context)


def _loss(model: Any, ids: mx.array, weights: mx.array) -> tuple[mx.array, mx.array]:
    """The weighted loss to descend, and that of the answers alone to show."""
    logits = model(ids[:, :-1]).astype(mx.float32)
    losses = nn.losses.cross_entropy(logits, ids[:, 1:])
    answers = (weights == 1.0).astype(mx.float32)
    shown = (losses * answers).sum() / mx.maximum(answers.sum(), 1.0)
    return (losses * weights).sum() / weights.sum(), shown
