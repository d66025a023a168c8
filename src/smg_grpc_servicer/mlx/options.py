"""The settings of the MLX server, and what they come to."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.options import server_settings
from smg_grpc_servicer.core.settings import Setting, Settings, Values
from smg_grpc_servicer.mlx.backend import DTYPES, BackendOptions

MODEL = Setting(
    "model",
    replace(parsers.TEXT, allowed="a model directory, a hub id, or demo"),
    "",
    "model directory, hub id, or `demo` for the tiny model in this package",
    "--model",
    "SMG_MLX_MODEL",
    required=True,
)
ADAPTER_PATH: Setting[str | None] = Setting(
    "adapter_path",
    parsers.TEXT,
    None,
    "directory of a LoRA adapter that is merged into the model",
    "--adapter-path",
    "SMG_MLX_ADAPTER_PATH",
)
SERVED_MODEL_NAME: Setting[str | None] = Setting(
    "served_model_name",
    parsers.TEXT,
    None,
    "name clients use for the model; --model when not set",
    "--served-model-name",
    "SMG_MLX_SERVED_MODEL_NAME",
)
PREFILL_BATCH_SIZE = Setting(
    "prefill_batch_size",
    parsers.POSITIVE_INT,
    8,
    "prompts processed together",
    "--prefill-batch-size",
    "SMG_MLX_PREFILL_BATCH_SIZE",
)
COMPLETION_BATCH_SIZE = Setting(
    "completion_batch_size",
    parsers.POSITIVE_INT,
    32,
    "requests that generate at once",
    "--completion-batch-size",
    "SMG_MLX_COMPLETION_BATCH_SIZE",
)
PREFILL_BUDGET = Setting(
    "prefill_budget",
    parsers.POSITIVE_INT,
    128,
    "prompt tokens processed between two tokens of running requests",
    "--prefill-budget",
    "SMG_MLX_PREFILL_BUDGET",
    old_envs=("MLX_PREFILL_STEP",),
)
MAX_QUEUED_REQUESTS = Setting(
    "max_queued_requests",
    parsers.POSITIVE_INT,
    1024,
    "requests that may wait for a place; more end RESOURCE_EXHAUSTED",
    "--max-queued-requests",
    "SMG_MLX_MAX_QUEUED_REQUESTS",
)
PROMPT_CACHE_BYTES = Setting(
    "prompt_cache_bytes",
    parsers.BYTES_OR_ZERO,
    1 << 30,
    "memory for prompts (of more than 64 tokens) that may come again; 0 = no prefix cache",
    "--prompt-cache-bytes",
    "SMG_MLX_PROMPT_CACHE_BYTES",
)
DTYPE = Setting(
    "dtype",
    parsers.one_of(*DTYPES),
    "auto",
    "dtype of the weights; auto = float32 on a CPU, as stored elsewhere",
    "--dtype",
    "SMG_MLX_DTYPE",
)
COMPILE = Setting(
    "mlx_compile",
    parsers.BOOLEAN,
    False,
    "let mlx compile on a CPU; each new kernel then stops all streams for about a second",
    "--mlx-compile",
    "SMG_MLX_COMPILE",
)

MAX_MESSAGE_BYTES = 32 * 2**20
"""Token ids and text only, no media: room for eight million ids."""

COALESCING = ("MLX_COALESCE_MS", "MLX_COALESCE_TICK_MS")
"""Variables of the published package that have nothing left to do: no request waits for others."""


def mlx_settings() -> Settings:
    """Everything `python -m smg_grpc_servicer.mlx` can be told."""
    return Settings(
        MODEL,
        ADAPTER_PATH,
        SERVED_MODEL_NAME,
        PREFILL_BATCH_SIZE,
        COMPLETION_BATCH_SIZE,
        PREFILL_BUDGET,
        MAX_QUEUED_REQUESTS,
        PROMPT_CACHE_BYTES,
        DTYPE,
        COMPILE,
    ) + server_settings("mlx", max_message_bytes=MAX_MESSAGE_BYTES)


def ignored_variables(environ: Mapping[str, str] = os.environ) -> list[str]:
    """Variables that are set and do nothing any more."""
    return [name for name in COALESCING if environ.get(name)]


@dataclass(frozen=True, slots=True)
class MlxOptions:
    """How the engine loads and schedules; the defaults are those of the settings."""

    model: str
    adapter_path: str | None = None
    served_model_name: str | None = None
    prefill_batch_size: int = PREFILL_BATCH_SIZE.default
    completion_batch_size: int = COMPLETION_BATCH_SIZE.default
    prefill_budget: int = PREFILL_BUDGET.default
    max_queued_requests: int = MAX_QUEUED_REQUESTS.default
    prompt_cache_bytes: int = PROMPT_CACHE_BYTES.default
    backend: BackendOptions = field(default_factory=BackendOptions)

    @classmethod
    def from_values(cls, values: Values) -> MlxOptions:
        return cls(
            model=values.get_value(MODEL),
            adapter_path=values.get_value(ADAPTER_PATH),
            served_model_name=values.get_value(SERVED_MODEL_NAME),
            prefill_batch_size=values.get_value(PREFILL_BATCH_SIZE),
            completion_batch_size=values.get_value(COMPLETION_BATCH_SIZE),
            prefill_budget=values.get_value(PREFILL_BUDGET),
            max_queued_requests=values.get_value(MAX_QUEUED_REQUESTS),
            prompt_cache_bytes=values.get_value(PROMPT_CACHE_BYTES),
            backend=BackendOptions(
                dtype=values.get_value(DTYPE), compile=values.get_value(COMPILE)
            ),
        )
