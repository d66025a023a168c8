"""One pooled vector from the scheduler, as the proto can carry it."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from smg_grpc_servicer.core.errors import FailedPrecondition, Internal, Unavailable
from smg_grpc_servicer.core.types import Embedding
from smg_grpc_servicer.sglang.failures import from_abort


class EmbeddingSink:
    """Waits for one embedding; a caller that left is no error here."""

    def __init__(self) -> None:
        self.answer: asyncio.Future[Embedding] = asyncio.get_running_loop().create_future()

    def output(self, batch: Any, at: int) -> None:
        reason = batch.finished_reasons[at]
        if reason is not None and reason["type"] == "abort":
            self.aborted(reason)
            return
        values = dense(batch.embeddings[at])
        if not self.answer.done():
            self.answer.set_result(Embedding(values, batch.prompt_tokens[at]))

    def aborted(self, reason: Mapping[str, Any] | None) -> None:
        self.failed(
            from_abort(reason or {}, None) or Unavailable("the scheduler aborted the request")
        )

    def failed(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


def dense(found: Any) -> list[float]:
    """:raises FailedPrecondition: the model gives something that is no vector."""
    if isinstance(found, dict):
        raise FailedPrecondition("the model's embeddings are sparse, which the proto cannot carry")
    if isinstance(found, (int, float)):
        return [float(found)]  # a score
    if not isinstance(found, (list, tuple)) or not found:
        raise Internal("the engine ended the request without an embedding")
    if isinstance(found[0], (list, tuple)):
        if len(found) > 1:
            raise FailedPrecondition(
                f"the model gave {len(found)} vectors for one text, and the proto carries one"
            )
        found = found[0]
    return list(found)
