"""`MlxEngineServicer`: the shared RPC bodies over the MLX proto."""

from __future__ import annotations

from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.metrics import Metrics
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.core.tracing import Spans
from smg_grpc_servicer.mlx.wire import MlxWire


class MlxEngineServicer(CoreServicer, mlx_engine_pb2_grpc.MlxEngineServicer):
    """Serves `mlx.grpc.engine.MlxEngine` from any `Engine`."""

    def __init__(
        self,
        engine: Engine,
        board: StatusBoard,
        *,
        metrics: Metrics | None = None,
        spans: Spans | None = None,
        max_chunk_tokens: int | None = None,
    ) -> None:
        super().__init__(
            engine,
            MlxWire(),
            board,
            metrics=metrics,
            spans=spans,
            max_chunk_tokens=max_chunk_tokens,
        )
