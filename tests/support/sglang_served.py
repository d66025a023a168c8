"""The SGLang servicer over a stub scheduler on real sockets, and a client, for one block."""

from __future__ import annotations

import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as pb_grpc

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.types import ModelFacts, ServerFacts
from smg_grpc_servicer.sglang.adapter import SglangEngine
from smg_grpc_servicer.sglang.encoders import Encoders
from smg_grpc_servicer.sglang.limits import Limits
from smg_grpc_servicer.sglang.request_manager import RequestManager
from smg_grpc_servicer.sglang.servicer import SglangServicerBase
from smg_grpc_servicer.sglang.sockets import Sockets
from smg_grpc_servicer.testing.history import History
from tests.support.sglang_stub import NOBODY, StubScheduler, ports
from tests.support.wait import until

FACTS = ModelFacts("/m", "m", max_context_length=4096, vocab_size=1000)
LIMITS = Limits(max_prompt_tokens=4000)
PROMPT = [5, 6, 7]


class Words:
    """A tokenizer with one token per letter."""

    def encode(self, text: str, **_: Any) -> list[int]:
        return [ord(letter) for letter in text]


@dataclass
class ServedSglang:
    """What a test talks to."""

    stub: Any
    scheduler: StubScheduler
    engine: SglangEngine
    manager: RequestManager
    servicer: SglangServicerBase
    board: StatusBoard
    dead: list[str] = field(default_factory=list)

    def request(self, request_id: str = "r", **fields: Any) -> Any:
        return request(request_id, **fields)

    async def sent(self, count: int = 1) -> list[Any]:
        """The first `count` messages that the scheduler got."""
        await until(lambda: len(self.scheduler.received) >= count)
        return self.scheduler.received[:count]

    async def aborted(self, *rids: str) -> None:
        """The scheduler was told to stop exactly these."""
        await until(lambda: len(self.scheduler.aborts) >= len(rids))
        assert sorted(self.scheduler.aborts) == sorted(rids)

    async def generate(self, sent: Any) -> History:
        return await History(stream=sent.stream).record(self.stub.Generate(sent))

    async def idle(self) -> None:
        """Nothing of any request is left anywhere."""
        await until(lambda: not any(self.engine.statistics().values()))
        await until(lambda: not any(self.servicer.statistics().values()))


def request(request_id: str = "r", **fields: Any) -> Any:
    params = {"temperature": 0.0, "max_new_tokens": 4, **fields.pop("params", {})}
    given = {"tokenized": {"input_ids": fields.pop("prompt", PROMPT)}, "stream": True, **fields}
    return pb.GenerateRequest(request_id=request_id, sampling_params=params, **given)


def pixels(**more: Any) -> dict[str, Any]:
    """One image's tensors and places, for `mm_inputs`."""
    data = struct.pack("<4f", 1.0, 2.0, 3.0, 4.0)
    tensor = {"data": data, "shape": [2, 2], "dtype": "float32"}
    grid = {"data": struct.pack("<3q", 1, 1, 1), "shape": [1, 3], "dtype": "int64"}
    return {
        "pixel_values": tensor,
        "model_specific_tensors": {"image_grid_thw": grid},
        "mm_placeholders": [{"offset": 1, "length": 2}],
        "im_token_id": 6,
        "image_data": [b"png"],
        "modalities": ["image"],
        **more,
    }


@asynccontextmanager
async def served_sglang(
    *,
    limits: Limits = LIMITS,
    ranks: int = 1,
    facts: ModelFacts = FACTS,
    skip_tokenizer_init: bool = False,
    serve: bool = False,
    revision: str | None = None,
    encoders: Encoders | None = None,
) -> AsyncIterator[ServedSglang]:
    port_args = ports()
    dead: list[str] = []
    sockets = Sockets.bind(port_args, skip_tokenizer_init)
    scheduler = StubScheduler(port_args, skip_tokenizer_init=skip_tokenizer_init)

    def died(reason: str) -> None:
        dead.append(reason)
        engine.died(reason)

    manager = RequestManager(sockets, num_ranks=ranks, on_dead=died)
    await manager.start()
    engine = SglangEngine(
        manager,
        model_facts=facts,
        server_facts=lambda: ServerFacts("grpc"),
        loads=_no_loads,
        limits=replace(limits, ranks=ranks),
        tokenizer=None if skip_tokenizer_init else Words(),
        encoders=encoders,
        revision=revision,
    )
    board = StatusBoard()
    servicer = SglangServicerBase(engine, board)
    server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
    pb_grpc.add_SglangSchedulerServicer_to_server(servicer, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    board.serving()
    if serve:
        scheduler.serve()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.SglangSchedulerStub(channel)
        await connected(manager, scheduler)
        try:
            yield ServedSglang(stub, scheduler, engine, manager, servicer, board, dead)
        finally:
            await server.stop(0)
            await engine.close()
            await manager.close("the test is over")
            await scheduler.close()


async def connected(manager: RequestManager, scheduler: StubScheduler) -> None:
    """Until the stub's sockets are there, nothing can be sent."""
    from sglang.srt.managers import io_struct

    def reached() -> bool:
        if not scheduler.reached:
            manager.stop(NOBODY)
        return scheduler.reached

    await until(reached)
    await scheduler.say_aside(io_struct.HealthCheckOutput())
    await until(lambda: manager.last_receive is not None)


async def _no_loads() -> list[Any]:
    return []
