"""One pooled vector from `AsyncLLM.encode`, whose generator aborts the request when it is left."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import aclosing
from typing import Any

from smg_grpc_servicer.core.errors import Internal
from smg_grpc_servicer.core.types import Embedding


async def embed(
    async_llm: Any, prompt: Any, engine_id: str, *, trace: Mapping[str, str] | None
) -> Embedding:
    """:raises Internal: vLLM ended the request with no vector, or with several."""
    from vllm.pooling_params import PoolingParams

    last = None
    more = {"trace_headers": dict(trace)} if trace else {}
    stream = async_llm.encode(prompt, PoolingParams(task="embed"), engine_id, **more)
    async with aclosing(stream):
        async for output in stream:
            last = output
    if last is None or not last.finished:
        raise Internal("the engine ended the request without an embedding")
    data = last.outputs.data
    if data.dim() != 1:
        raise Internal(f"an embedding is one vector; the model gave the shape {[*data.shape]}")
    return Embedding(data.float().tolist(), len(last.prompt_token_ids))
