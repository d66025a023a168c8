"""The wings' servicers that take any engine, by the proto they serve."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.testing.dialects import Dialect

CLASSES = {
    "mlx": "MlxEngineServicer",
    "vllm": "VllmServicerBase",
    "sglang": "SglangServicerBase",
    "tokenspeed": "TokenSpeedServicerBase",
}
"""By engine: the class in its `servicer` module."""


def servicer_for(
    dialect: Dialect, engine: Engine, board: StatusBoard, **options: Any
) -> CoreServicer:
    """A dialect's servicer over an engine, of whichever make."""
    module = import_module(f"smg_grpc_servicer.{dialect.engine}.servicer")
    servicer: CoreServicer = getattr(module, CLASSES[dialect.engine])(engine, board, **options)
    return servicer
