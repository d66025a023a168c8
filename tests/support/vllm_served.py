"""`VllmEngineServicer` over the stub AsyncLLM on a real socket, as vLLM's launcher puts it up."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from time import time
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import vllm_engine_pb2_grpc

from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.history import History
from smg_grpc_servicer.vllm.health_servicer import VllmHealthServicer
from smg_grpc_servicer.vllm.servicer import VllmEngineServicer
from tests.support.stub_async_llm import StubAsyncLLM
from tests.support.wait import until

DIALECT = DIALECTS["vllm"]
PROMPT = [5, 6, 7]


@dataclass
class ServedVllm:
    """A running server and one client connection to it."""

    llm: StubAsyncLLM
    servicer: VllmEngineServicer
    health: VllmHealthServicer
    stub: Any
    health_stub: Any

    async def generate(self, request_id: str = "r", **options: Any) -> History:
        """Send a request and read it to its end; `request` holds fields beside the sampling."""
        request = self.request(request_id, **options)
        return await History(stream=request.stream).record(self.stub.Generate(request))

    def request(self, request_id: str = "r", **options: Any) -> Any:
        extra = options.pop("request", {})
        made = DIALECT.generate(request_id, options.pop("prompt", PROMPT), **options)
        for name, value in extra.items():
            setattr(made, name, value)
        return made

    async def serving(self, name: str = "") -> bool:
        answer = await self.health_stub.Check(health_pb2.HealthCheckRequest(service=name))
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    async def idle(self) -> None:
        """Everything the requests had is given back."""
        busy = ("in_flight", "running", "calls", "tracked", "silent", "silent_tokens")
        await until(lambda: not any(self.servicer.statistics()[name] for name in busy))
        await until(lambda: not self.llm.in_flight)


@asynccontextmanager
async def served_vllm(llm: StubAsyncLLM, **options: Any) -> AsyncIterator[ServedVllm]:
    """Put up, hand out, and find everything empty at the end."""
    servicer = VllmEngineServicer(llm, time(), **options)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server(servicer, server)
    health = VllmHealthServicer(llm)
    health_pb2_grpc.add_HealthServicer_to_server(health, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        served = ServedVllm(
            llm, servicer, health, DIALECT.stub(channel), health_pb2_grpc.HealthStub(channel)
        )
        try:
            yield served
            await served.idle()
        finally:
            await server.stop(0)
            await servicer.close()
            llm.shutdown()


class PlainAsyncLLM(StubAsyncLLM):
    """One that is read through `generate`, as a wrapper around an engine client is."""

    def __getattribute__(self, name: str) -> Any:
        if name == "add_request":
            raise AttributeError(name)
        return super().__getattribute__(name)

    async def generate(self, *args: Any, **options: Any) -> Any:
        class Inner:
            add_request = StubAsyncLLM.add_request.__get__(self)
            abort = self.abort

        async for output in StubAsyncLLM.generate(Inner, *args, **options):  # type: ignore[arg-type]
            yield output
