"""The shared RPC bodies over the vLLM proto."""

from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.metrics import Metrics
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.vllm.wire import VllmWire


class VllmServicerBase(CoreServicer, vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves `vllm.grpc.engine.VllmEngine` from any `Engine`."""

    def __init__(
        self,
        engine: Engine,
        board: StatusBoard,
        *,
        metrics: Metrics | None = None,
        max_chunk_tokens: int | None = None,
    ) -> None:
        super().__init__(
            engine, VllmWire(), board, metrics=metrics, max_chunk_tokens=max_chunk_tokens
        )
