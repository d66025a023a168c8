"""What a model's and a server's configuration says, read leniently and sent out safely.

The readers take the dictionaries of `config.json` and `generation_config.json` (Hugging Face's
names). What is missing or makes no sense is None or empty: nothing is invented. A multimodal
model keeps its language half in a nested configuration; the outer one wins.
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, SupportsIndex

from google.protobuf.struct_pb2 import Struct, Value

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.jsonable import Json, jsonable
from smg_grpc_servicer.core.redaction import redact, redact_text

__all__ = [
    "architectures",
    "bos_token_id",
    "context_limit",
    "count",
    "default_sampling",
    "default_sampling_json",
    "eos_token_ids",
    "json_text",
    "jsonable",
    "model_type",
    "pad_token_id",
    "read_config",
    "redact",
    "redact_text",
    "to_struct",
    "token_id",
    "vocab_size",
]

Config = Mapping[str, object]

SAMPLING_KEYS = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")
"""The defaults a gateway applies; it reads no others."""

_NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
_CONTEXT_KEYS = (
    "max_position_embeddings",
    "n_positions",
    "max_sequence_length",
    "max_seq_length",
    "max_seq_len",
    "seq_length",
    "n_ctx",
)
_MAX_EXACT_INT = 2**53
"""A Struct's number is a double."""
_MAX_CONFIG_BYTES = 64 * 1024 * 1024


def count(value: object) -> int | None:
    """`value` if it is a positive integer (of any integer type, not a bool), else None."""
    number = token_id(value)
    return number or None


def token_id(value: object) -> int | None:
    """`value` if it is an integer that can be a token id, else None."""
    # numpy's bool has no __index__ since 2.0 and warns before.
    if not isinstance(value, SupportsIndex) or type(value).__name__ in ("bool", "bool_"):
        return None
    try:
        number = operator.index(value)
    except TypeError:  # an array has the method too, but only some sizes work
        return None
    return number if number >= 0 else None


def read_config(path: Path) -> dict[str, object]:
    """The JSON object in `path`; empty when there is no such file. `ConfigError` when broken."""
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
        if len(data) > _MAX_CONFIG_BYTES:
            raise ConfigError(f"{path}: more than {_MAX_CONFIG_BYTES} bytes")
        content = json.loads(data)
    except FileNotFoundError:
        return {}
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{path}: got {type(content).__name__}, a JSON object is needed")
    return content


def eos_token_ids(config: Config, generation: Config | None = None) -> tuple[int, ...]:
    """All ids that end a text: the model's, then those that only the generation config adds."""
    ids: dict[int, None] = {}
    for source in (config, generation or {}):
        for value in _found(source, "eos_token_id"):
            several = isinstance(value, (list, tuple))
            for item in value if isinstance(value, (list, tuple)) else [value]:
                if (number := token_id(item)) is not None:
                    ids[number] = None
            if ids or several:
                break
    return tuple(ids)


def bos_token_id(config: Config, generation: Config | None = None) -> int | None:
    return _special("bos_token_id", config, generation)


def pad_token_id(config: Config, generation: Config | None = None) -> int | None:
    return _special("pad_token_id", config, generation)


def context_limit(config: Config) -> int | None:
    """The most tokens, prompt and output together, that the model was made for."""
    for layer in _layers(config):
        # Cohere: the positions are an older figure there.
        if limit := count(layer.get("model_max_length")):
            return limit
        limits = [limit for key in _CONTEXT_KEYS if (limit := count(layer.get(key)))]
        if limits:
            return max(min(limits), _yarn_limit(layer))
    return None


def vocab_size(config: Config) -> int | None:
    return next((size for v in _found(config, "vocab_size") if (size := count(v))), None)


def architectures(config: Config) -> tuple[str, ...]:
    for value in _found(config, "architectures"):
        if isinstance(value, (list, tuple)):
            return tuple(name for name in value if isinstance(name, str) and name)
    return ()


def model_type(config: Config) -> str | None:
    return next((v for v in _found(config, "model_type") if isinstance(v, str) and v), None)


def default_sampling(mapping: Config) -> dict[str, int | float]:
    """The finite numbers among `SAMPLING_KEYS`, by name."""
    result: dict[str, int | float] = {}
    for key in sorted(SAMPLING_KEYS):
        value = jsonable(mapping.get(key))
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            continue
        # A gateway reads top_k as an integer; some files say 20.0.
        result[key] = int(value) if key == "top_k" and value == int(value) else value
    return result


def default_sampling_json(mapping: Config) -> str:
    """`default_sampling` as canonical JSON (sorted, compact); "" when it is empty."""
    values = default_sampling(mapping)
    return json.dumps(values, separators=(",", ":"), allow_nan=False) if values else ""


def json_text(mapping: Mapping[Any, object]) -> str:
    """`mapping` without credentials as compact JSON; "" when it is empty."""
    if not mapping:
        return ""
    return json.dumps(
        redact({str(key): value for key, value in mapping.items()}),
        separators=(",", ":"),
        allow_nan=False,
    )


def to_struct(mapping: Mapping[str, object]) -> Struct:
    """A protobuf Struct of `mapping` without credentials. Integers past 2**53 become text."""
    struct = Struct()
    _fill(struct, redact(mapping))
    return struct


def _fill(struct: Struct, members: Mapping[str, Json]) -> None:
    for key, value in members.items():
        _set(struct.fields[key], value)


def _set(target: Value, value: Json) -> None:
    if value is None:
        target.null_value = 0  # type: ignore[assignment]
    elif isinstance(value, bool):
        target.bool_value = value
    elif isinstance(value, str):
        target.string_value = value
    elif isinstance(value, (int, float)):
        if isinstance(value, int) and abs(value) > _MAX_EXACT_INT:
            target.string_value = str(value)
        else:
            target.number_value = value
    elif isinstance(value, dict):
        target.struct_value.SetInParent()
        _fill(target.struct_value, value)
    else:
        target.list_value.SetInParent()
        for item in value:
            _set(target.list_value.values.add(), item)


def _layers(config: Config, depth: int = 0) -> Iterator[Config]:
    """The configuration and the language models nested in it, outermost first."""
    yield config
    for key in _NESTED:
        nested = config.get(key)
        if isinstance(nested, Mapping) and depth < 3:
            yield from _layers(nested, depth + 1)


def _found(config: Config, key: str) -> Iterator[object]:
    return (layer[key] for layer in _layers(config) if layer.get(key) is not None)


def _special(key: str, config: Config, generation: Config | None) -> int | None:
    for source in (config, generation or {}):
        for value in _found(source, key):
            if (number := token_id(value)) is not None:
                return number
    return None


def _yarn_limit(layer: Config) -> int:
    """A YaRN model's stretched context; its positions may still be the unstretched ones."""
    for key in ("rope_scaling", "rope_parameters"):
        rope = layer.get(key)
        if not isinstance(rope, Mapping) or rope.get("rope_type", rope.get("type")) != "yarn":
            continue
        original, factor = count(rope.get("original_max_position_embeddings")), rope.get("factor")
        if original and isinstance(factor, (int, float)) and math.isfinite(factor):
            return int(original * factor)
    return 0
