"""vLLM behind the gateway: `vllm serve MODEL --grpc` with this package installed.

Importing this package imports neither vLLM nor grpc; its public names come when they are asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smg_grpc_servicer.vllm.health_servicer import VllmHealthServicer
    from smg_grpc_servicer.vllm.impl import resolve_servicer_impl
    from smg_grpc_servicer.vllm.rust import serve_rust
    from smg_grpc_servicer.vllm.servicer import VllmEngineServicer

__all__ = ["VllmEngineServicer", "VllmHealthServicer", "resolve_servicer_impl", "serve_rust"]

_HOMES = {
    "VllmEngineServicer": "servicer",
    "VllmHealthServicer": "health_servicer",
    "resolve_servicer_impl": "impl",
    "serve_rust": "rust",
}


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
