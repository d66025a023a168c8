"""`VllmHealthServicer(async_llm)`: `grpc.health.v1` with vLLM's service name for readiness."""

from __future__ import annotations

from typing import Any

from smg_grpc_servicer.core import boards
from smg_grpc_servicer.core.health import HealthServicer
from smg_grpc_servicer.vllm import launcher_switch
from smg_grpc_servicer.vllm.wire import VllmWire


class VllmHealthServicer(HealthServicer):
    """Says what the servicer over the same engine says."""

    def __init__(self, async_llm: Any) -> None:
        self._shared = boards.of(async_llm)
        super().__init__(self._shared, [VllmWire.service])

    def set_not_serving(self) -> None:
        """Readiness goes down for good and new requests are refused; what runs goes on."""
        self._shared.draining()


# vLLM's launcher imports this module before it defines what we put our own in place of.
launcher_switch.announce()
