"""The shared RPC bodies over the SGLang proto."""

from __future__ import annotations

from typing import NoReturn

from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc

from smg_grpc_servicer.core.control import Context
from smg_grpc_servicer.core.errors import Unsupported
from smg_grpc_servicer.core.servicer import CoreServicer
from smg_grpc_servicer.core.wire import Message
from smg_grpc_servicer.sglang.fields import ADAPTER_CALLS
from smg_grpc_servicer.sglang.wire import SglangWire


class SglangServicerBase(CoreServicer, sglang_scheduler_pb2_grpc.SglangSchedulerServicer):
    """Serves `sglang.grpc.scheduler.SglangScheduler` from any `Engine`."""

    wire = SglangWire()

    async def LoadLoRAAdapter(self, request: Message, context: Context) -> NoReturn:
        await self._no_adapters(context)

    async def UnloadLoRAAdapter(self, request: Message, context: Context) -> NoReturn:
        await self._no_adapters(context)

    async def ListLoadedLoRAAdapters(self, request: Message, context: Context) -> NoReturn:
        await self._no_adapters(context)

    async def _no_adapters(self, context: Context) -> NoReturn:
        """What the generated base would answer names neither the engine nor the feature."""
        await self._refused(context, Unsupported(self.engine.name, ADAPTER_CALLS))
