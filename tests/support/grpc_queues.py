"""Whether this grpcio gives a method a queue of its own; older ones have one for all."""

from __future__ import annotations

from grpc._cython import cygrpc  # type: ignore[attr-defined]

ONE_FOR_ALL = not hasattr(cygrpc.AioServer, "add_registered_method_handlers")
