"""The shared RPC bodies over the TokenSpeed proto."""

from __future__ import annotations

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.metrics import Metrics
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.tokenspeed.wire import TokenSpeedWire


class TokenSpeedServicerBase(
    CoreServicer, tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerServicer
):
    """Serves `tokenspeed.grpc.scheduler.TokenSpeedScheduler` from any `Engine`."""

    def __init__(
        self,
        engine: Engine,
        board: StatusBoard,
        *,
        metrics: Metrics | None = None,
        max_chunk_tokens: int | None = None,
    ) -> None:
        super().__init__(
            engine, TokenSpeedWire(), board, metrics=metrics, max_chunk_tokens=max_chunk_tokens
        )
