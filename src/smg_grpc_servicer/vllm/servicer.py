"""The shared RPC bodies over the vLLM proto."""

from __future__ import annotations

from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.vllm.wire import VllmWire


class VllmServicerBase(CoreServicer, vllm_engine_pb2_grpc.VllmEngineServicer):
    """Serves `vllm.grpc.engine.VllmEngine` from any `Engine`."""

    wire = VllmWire()
