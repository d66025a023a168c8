"""The LoRA RPCs over any engine: what the engine refuses is an answer, what we do a status."""

from __future__ import annotations

from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.control import Context, ControlBodies
from smg_grpc_servicer.core.status import presentable
from smg_grpc_servicer.core.types import Feature
from smg_grpc_servicer.core.wire import Message
from smg_grpc_servicer.sglang import wire_parts


class AdapterCalls(ControlBodies):
    """Mixed into the servicer base."""

    async def LoadLoRAAdapter(self, request: Message, context: Context) -> Message:
        async def body() -> Message:
            self._require_adapters()
            refusal = await self.engine.load_adapter(wire_parts.adapter(request))
            return self._changed(pb.LoadLoRAAdapterResponse, refusal)

        return await self._unary(context, body)

    async def UnloadLoRAAdapter(self, request: Message, context: Context) -> Message:
        async def body() -> Message:
            self._require_adapters()
            refusal = await self.engine.unload_adapter(request.lora_name, request.lora_id or None)
            return self._changed(pb.UnloadLoRAAdapterResponse, refusal)

        return await self._unary(context, body)

    async def ListLoadedLoRAAdapters(self, request: Message, context: Context) -> Message:
        async def body() -> Message:
            self._require_adapters()
            response = pb.ListLoadedLoRAAdaptersResponse()
            for adapter in self.engine.adapters():
                wire_parts.fill_adapter(response.loaded_adapters.add(), adapter)
            return response

        return await self._unary(context, body)

    def _require_adapters(self) -> None:
        self.board.require_accepting()
        self._require_features(frozenset({Feature.LORA}))

    def _changed(self, response: Message, refusal: str) -> Message:
        return response(
            success=not refusal,
            message=presentable(refusal),
            loaded_lora_ids=[adapter.id for adapter in self.engine.adapters()],
        )
