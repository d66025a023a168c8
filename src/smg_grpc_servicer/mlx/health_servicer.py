"""`MlxHealthServicer`: `grpc.health.v1` with MLX's service name for readiness."""

from __future__ import annotations

from smg_grpc_servicer.core.health import HealthServicer, StatusBoard
from smg_grpc_servicer.mlx.wire import MlxWire


class MlxHealthServicer(HealthServicer):
    """For people who put a server together themselves; `server.py` does it for everybody else."""

    def __init__(self, board: StatusBoard) -> None:
        super().__init__(board, [MlxWire.service])
        self._board = board

    def set_not_serving(self) -> None:
        """Readiness goes down for good; what runs goes on."""
        self._board.draining()
