"""The shared RPC bodies over the TokenSpeed proto."""

from __future__ import annotations

from smg_grpc_proto.generated import tokenspeed_scheduler_pb2_grpc

from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.tokenspeed.wire import TokenSpeedWire


class TokenSpeedServicerBase(
    CoreServicer, tokenspeed_scheduler_pb2_grpc.TokenSpeedSchedulerServicer
):
    """Serves `tokenspeed.grpc.scheduler.TokenSpeedScheduler` from any `Engine`."""

    wire = TokenSpeedWire()
