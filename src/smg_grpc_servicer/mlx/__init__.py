"""MLX behind the gateway: `python -m smg_grpc_servicer.mlx --model demo`.

Importing this package imports neither mlx nor grpc; its public names come when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smg_grpc_servicer.mlx.health_servicer import MlxHealthServicer
    from smg_grpc_servicer.mlx.servicer import MlxEngineServicer

__all__ = ["MlxEngineServicer", "MlxHealthServicer"]

_HOMES = {"MlxEngineServicer": "servicer", "MlxHealthServicer": "health_servicer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
