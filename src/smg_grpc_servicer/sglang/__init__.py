"""SGLang behind the gateway: `sglang serve --smg-grpc-mode` with this package installed.

Importing this package imports neither SGLang nor grpc; its public names come when they are asked
for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smg_grpc_servicer.sglang.health_servicer import SGLangHealthServicer
    from smg_grpc_servicer.sglang.servicer import SGLangSchedulerServicer

__all__ = ["SGLangHealthServicer", "SGLangSchedulerServicer"]

_HOMES = {"SGLangHealthServicer": "health_servicer", "SGLangSchedulerServicer": "servicer"}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
