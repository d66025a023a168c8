"""What SGLang's own configuration says about the model and the server, in core terms.

Read from its resolved record (`resolving_view`) and its `ModelConfig`, not from the schedulers'
ready report, which knows capacities only. Unknown stays None. Everything told goes out redacted.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from smg_grpc_servicer.core.facts import default_sampling, token_id
from smg_grpc_servicer.core.types import ModelFacts, ServerFacts

PAIRING_PROTOCOL = "SMG_PAIRING_PROTOCOL"
MODALITIES = ("audio", "image", "video")

_SECRET = ("watermark_key", "watermark_key_b", "watermark_config")
"""Fields that SGLang itself leaves out of what it shows."""
_LANGUAGE_PARTS = ("text_config", "llm_config", "language_config", "thinker_config")


def num_ranks(config: Any) -> int:
    """Data-parallel ranks: replicas times attention groups, of which one is one.

    Until 0.5.21 `dp_size` counted both.
    """
    from sglang.srt import runtime_context

    count = getattr(runtime_context, "num_dp_ranks_of", None)
    return int(config.dp_size if count is None else count(config))


def model_facts(
    config: Any,
    model: Any,
    ready: Mapping[str, Any],
    given: Mapping[str, Any] | None = None,
) -> ModelFacts:
    """Of a running model.

    :param config: SGLang's resolved record.
    :param model: its `ModelConfig`.
    :param ready: the first rank's ready report.
    :param given: what the launcher says instead, by the names of GetModelInfo's fields.
    """
    hf = model.hf_config
    path = config.model_path
    preferred = _preferred(config.preferred_sampling_params)
    facts: dict[str, Any] = {
        "model_path": path,
        "served_model_name": config.served_model_name or path,
        "tokenizer_path": config.tokenizer_path or path,
        "is_generation": bool(model.is_generation),
        "supports_vision": bool(model.is_multimodal and model.is_image_understandable_model),
        "max_context_length": model.context_len,
        "max_prompt_tokens": ready.get("max_req_input_len"),
        "vocab_size": model.vocab_size,
        "model_type": _text(_hf(hf, "model_type")),
        "architectures": _texts(_hf(hf, "architectures")),
        "eos_token_ids": tuple(sorted(_ids(model.hf_eos_token_id))),
        "pad_token_id": token_id(_hf(hf, "pad_token_id")),
        "bos_token_id": token_id(_hf(hf, "bos_token_id")),
        "default_sampling": default_sampling({**model.get_default_sampling_params(), **preferred}),
        "preferred_sampling": preferred,
        "labels": _labels(hf),
        "weight_version": config.weight_version,
        "dtype": None if model.dtype is None else str(model.dtype),
    }
    names = {"max_req_input_len": "max_prompt_tokens"}
    for name, value in (given or {}).items():
        if names.get(name, name) in facts and value is not None:
            facts[names.get(name, name)] = tuple(value) if isinstance(value, list) else value
    return ModelFacts(**facts)


def server_facts(
    args: Any,
    config: Any,
    ready: Mapping[str, Any],
    bounds: Callable[[], Mapping[int, int]],
    version: str | None,
) -> Callable[[], ServerFacts]:
    """What GetServerInfo tells, made when asked: the running window is learned from load reports.

    :param args: SGLang's record, for all its fields.
    :param bounds: most requests a rank runs at once, by rank, as far as known.
    """
    ranks = num_ranks(config)
    told: dict[str, object] = {
        name: value for name, value in args.resolved_dict().items() if name not in _SECRET
    }
    # The gateway makes one worker of each data-parallel rank, and knows no other width.
    told["dp_size"] = ranks
    told |= labels(config)
    scheduler = {name: value for name, value in ready.items() if name != "status"}
    # One replica's attention groups share its window.
    groups = ranks if told.get("enable_dp_attention") else 1

    def made() -> ServerFacts:
        window = config.max_running_requests or _window(bounds(), ranks, groups)
        return ServerFacts(
            server_type="grpc",
            version=version,
            data_parallel_size=ranks,
            max_running_requests=window,
            server_args={**told, "max_running_requests": window},
            scheduler_info=scheduler,
        )

    return made


def labels(config: Any, environ: Mapping[str, str] = os.environ) -> dict[str, object]:
    """What the gateway reads beside SGLang's own arguments."""
    told: dict[str, object] = {"grammar_backend": grammar_backend(config)}
    protocol = environ.get(PAIRING_PROTOCOL, "").strip()
    if protocol:
        told["pairing_protocol"] = protocol
    limits = item_limits(config.limit_mm_data_per_request)
    if limits:
        told["mm_item_limits"] = limits
    parser = config.reasoning_parser
    if parser != "auto":  # unresolved: nobody knows
        told["engine_reasoning_parser"] = parser or ""
        told["constrained_decoding_start"] = "after_reasoning" if parser else "first_token"
    return told


def grammar_backend(config: Any) -> str:
    """Without a tokenizer a scheduler has none, whatever was asked for."""
    return "none" if config.skip_tokenizer_init else str(config.grammar_backend or "xgrammar")


def media_items(limits: object) -> dict[str, int]:
    """Most media of a request by kind: what is a count of `--limit-mm-data-per-request`."""
    if isinstance(limits, str):
        try:
            limits = json.loads(limits)
        except ValueError:
            return {}
    if not isinstance(limits, Mapping):
        return {}
    found = {name: limits.get(name) for name in MODALITIES}
    return {name: most for name, most in found.items() if type(most) is int and most >= 0}


def item_limits(limits: object) -> str:
    """`audio=1,image=8`, as the gateway reads it: of those, the ones that are not zero."""
    return ",".join(f"{name}={most}" for name, most in media_items(limits).items() if most)


def _window(bounds: Mapping[int, int], ranks: int, groups: int) -> int | None:
    """As `--max-running-requests` would say it, which attention groups share; None before all
    ranks have told theirs.
    """
    return min(bounds.values()) * groups if len(bounds) >= ranks else None


def _preferred(value: object) -> dict[str, object]:
    """`--preferred-sampling-params`, which is JSON or already read."""
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError:
            return {}
    return {str(key): item for key, item in value.items()} if isinstance(value, Mapping) else {}


def _labels(hf: Any) -> dict[int, str]:
    """A classifier's own names; transformers makes up two for every other model."""
    found = getattr(hf, "id2label", None)
    architectures = _texts(_hf(hf, "architectures"))
    if not isinstance(found, Mapping) or not any("Classification" in a for a in architectures):
        return {}
    named = {token_id(_number(key)): str(name) for key, name in found.items()}
    return {index: name for index, name in named.items() if index is not None}


def _number(key: object) -> object:
    return int(key) if isinstance(key, str) and key.isdecimal() else key


def _hf(hf: Any, name: str) -> object:
    """Of the model, else of its language half."""
    value = getattr(hf, name, None)
    for part in _LANGUAGE_PARTS:
        if value is not None:
            break
        value = getattr(getattr(hf, part, None), name, None)
    return value


def _ids(value: object) -> Sequence[int]:
    several = value if isinstance(value, (list, tuple, set, frozenset)) else [value]
    return [number for item in several if (number := token_id(item)) is not None]


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _texts(value: object) -> tuple[str, ...]:
    if not isinstance(value, (list, tuple)):
        return ()
    return tuple(item for item in value if isinstance(item, str))
