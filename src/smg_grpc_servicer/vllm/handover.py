"""A decode request that the engine never took, and the prefill's blocks that wait for it.

Prefill pins KV blocks until decode has fetched them. A decode request (`do_remote_prefill`) that
is refused, cancelled or aborted before vLLM has it must be told to the connector, exactly once
and to the rank it was pinned to, or the blocks stay until the connector's own timeout.
The servicer opens a `Handover` around an RPC; the engine marks it taken.
"""

from __future__ import annotations

import contextvars
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from smg_grpc_servicer.core.errors import InvalidArgument
from smg_grpc_servicer.core.wire_parts import json_object

log = logging.getLogger(__name__)


@dataclass(slots=True)
class Handover:
    """What the connector would have to hear about one request."""

    request_id: str
    params: dict[str, Any]
    rank: int | None
    taken: bool = False
    """vLLM has the request (or another one has these blocks), so nothing is to be told."""

    @classmethod
    def of(cls, request: Any) -> Handover | None:
        """None when the request fetches nothing from a prefill."""
        if not request.HasField("kv_transfer_params_json"):
            return None
        try:
            params = json_object("kv_transfer_params_json", request.kv_transfer_params_json)
        except InvalidArgument:
            return None
        if not params.get("do_remote_prefill"):
            return None
        pinned = request.HasField("data_parallel_rank")
        return cls(request.request_id, params, request.data_parallel_rank if pinned else None)


_current: contextvars.ContextVar[Handover | None] = contextvars.ContextVar("handover", default=None)


@contextmanager
def opened(handover: Handover) -> Iterator[None]:
    """Within it, in this task, `taken` is about this handover."""
    token = _current.set(handover)
    try:
        yield
    finally:
        _current.reset(token)


def taken() -> None:
    """The request at hand needs no notice any more."""
    handover = _current.get()
    if handover is not None:
        handover.taken = True
