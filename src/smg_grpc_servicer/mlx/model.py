"""Loading a model for the generation thread: weights, tokenizer, and the facts of both.

mlx binds lazy arrays to the stream of the thread that made them, so every array of the module
tree is evaluated here, those in underscore attributes (RoPE tables) included, which mlx-lm's
loader skips.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.progress import progress
from smg_grpc_servicer.mlx import demo

logger = logging.getLogger(__name__)

DEMO = "demo"
MESSAGE = 300
"""Characters of a library's own words that are passed on."""
CONTEXT_KEYS = ("max_position_embeddings", "max_seq_len", "n_positions", "seq_length")
ALLOW_PATTERNS = (
    "*.json",
    "model*.safetensors",
    "*.py",
    "tokenizer.model",
    "*.tiktoken",
    "*.txt",
    "*.jsonl",
    "*.jinja",
)
"""Files of a hub snapshot that mlx-lm reads."""


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready to run on any thread."""

    model: Any
    tokenizer: Any
    """mlx-lm's TokenizerWrapper."""
    name: str
    """As the operator wrote it."""
    directory: Path
    config: Mapping[str, Any]
    eos_token_ids: tuple[int, ...]
    context_length: int | None
    vocab_size: int
    """Ids below this can be fed and biased: the smallest of configuration, embedding, head."""
    dtype: str | None


def load(source: str, *, adapter_path: str | None = None, dtype: str | None = None) -> LoadedModel:
    """Load a directory, `demo`, or a hub id (cache first); ConfigError when it cannot be."""
    directory = resolve(source)
    if adapter_path is not None and not Path(adapter_path).is_dir():
        raise ConfigError(f"--adapter-path: {adapter_path} is not a directory")
    from mlx_lm import load as mlx_load

    config = read_config(directory)
    try:
        model, tokenizer = mlx_load(str(directory), adapter_path=adapter_path, lazy=True)[:2]
        if dtype is not None:
            model.set_dtype(getattr(mx, dtype))
        _read_weights(model, source)
    except Exception as error:  # whatever is wrong in a directory of files
        raise ConfigError(f"--model: {source} cannot be loaded: {_short(error)}") from error
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        name=source,
        directory=directory,
        config=config,
        eos_token_ids=eos_ids(config, tokenizer),
        context_length=context_length(config),
        vocab_size=vocab_size(config, model),
        dtype=weights_dtype(model),
    )


def _read_weights(model: nn.Module, source: str) -> None:
    """mlx reads an array from its file when it is evaluated; that is most of a load's time."""
    weights = list(arrays(model))
    with progress(f"loading {source}", sum(array.nbytes for array in weights)) as advance:
        for array in weights:
            mx.eval(array)
            advance(array.nbytes)


def resolve(source: str) -> Path:
    """The directory of a model; a hub id comes from the local cache, else it is downloaded."""
    path = Path(source).expanduser()
    if source == DEMO and not path.is_dir():
        path = demo.path()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise ConfigError(f"--model: {path} has no config.json")
        return path
    if path.exists() or path.is_absolute() or source.startswith("."):
        raise ConfigError(f"--model: {source} is not a directory")
    return _snapshot(source)


def _snapshot(source: str) -> Path:
    from huggingface_hub import snapshot_download

    patterns = list(ALLOW_PATTERNS)
    try:
        cached = Path(snapshot_download(source, local_files_only=True, allow_patterns=patterns))
        # A cache may hold the tokenizer of a model alone.
        if (cached / "config.json").is_file() and any(cached.glob("model*.safetensors")):
            return cached
    except (OSError, ValueError):
        logger.debug("%s is not in the local hub cache", source)
    logger.info("downloading %s from the hub", source)
    try:
        return Path(snapshot_download(source, allow_patterns=patterns))
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--model: {source} is neither a directory (nor the word {DEMO}) nor a model that the "
            f"hub delivers: {_short(error)}"
        ) from error


def _short(error: Exception) -> str:
    """What an operator has to know of it; hub errors go on for a page."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= MESSAGE else text[:MESSAGE] + " …"


def read_config(directory: Path) -> dict[str, Any]:
    """:raises ConfigError: there is none, or it is no JSON object."""
    path = directory / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"--model: cannot read {path} ({error.strerror})") from error
    except ValueError as error:
        raise ConfigError(f"--model: {path} is no JSON: {error}") from error
    if not isinstance(config, dict):
        raise ConfigError(f"--model: {path} holds no JSON object")
    return config


def eos_ids(config: Mapping[str, Any], tokenizer: Any) -> tuple[int, ...]:
    """The configuration's end-of-text ids in its order, else the tokenizer's, else none."""
    value = _look_up(config, ("eos_token_id",), lambda v: isinstance(v, (int, list)))
    if isinstance(value, int):
        return (value,)
    if value:
        return tuple(int(token) for token in value)
    return tuple(sorted(int(token) for token in tokenizer.eos_token_ids or ()))


def context_length(config: Mapping[str, Any]) -> int | None:
    """Most tokens of prompt and output together; None when the model does not say."""
    value: int | None = _look_up(config, CONTEXT_KEYS, _positive)
    return value


def vocab_size(config: Mapping[str, Any], model: nn.Module) -> int:
    """The ids that may be used: mlx does not check bounds, an id past them reads foreign memory."""
    limits = [rows for name, rows in _tables(model) if "embed" in name or "wte" in name]
    if not limits:
        limits = [max(rows for _, rows in _tables(model))]
    limits = [max(limits), *(rows for name, rows in _tables(model) if name.endswith("lm_head"))]
    stated = _look_up(config, ("vocab_size",), _positive)
    return min(limits) if stated is None else min(*limits, int(stated))


def weights_dtype(model: nn.Module) -> str | None:
    """The dtype of the first floating-point weight, as the configuration spells dtypes."""
    for array in arrays(model):
        if mx.issubdtype(array.dtype, mx.floating):
            return str(array.dtype).rsplit(".", 1)[-1]
    return None


def arrays(node: Any) -> Iterator[mx.array]:
    """Every array reachable from a module: parameters, and what private attributes hold."""
    seen: set[int] = set()
    stack = [node]
    while stack:
        item = stack.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, mx.array):
            yield item
        elif isinstance(item, nn.Module):
            stack += [*item.values(), *vars(item).values()]
        elif isinstance(item, dict):
            stack += item.values()
        elif isinstance(item, (list, tuple)):
            stack += item


def _tables(model: nn.Module) -> list[tuple[str, int]]:
    """Embeddings and output head: module path and number of token rows."""
    kinds = (nn.Embedding, nn.QuantizedEmbedding)
    return [
        (name, int(module.weight.shape[0]))
        for name, module in model.named_modules()
        if isinstance(module, kinds) or name.endswith("lm_head")
        if "weight" in module and "pos" not in name
    ]


def _look_up(
    config: Mapping[str, Any], keys: tuple[str, ...], accept: Callable[[Any], bool]
) -> Any:
    """The first acceptable value, in the configuration or in its `text_config`."""
    for place in (config, config.get("text_config") or {}):
        for key in keys:
            if accept(place.get(key)):
                return place[key]
    return None


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0
