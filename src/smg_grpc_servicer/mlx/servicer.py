"""`MlxEngineServicer`: the shared RPC bodies over the MLX proto."""

from __future__ import annotations

from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.mlx.wire import MlxWire


class MlxEngineServicer(CoreServicer, mlx_engine_pb2_grpc.MlxEngineServicer):
    """Serves `mlx.grpc.engine.MlxEngine` from any `Engine`."""

    wire = MlxWire()
