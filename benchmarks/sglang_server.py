"""One server of `sglang_servicer.py`, in a process of its own: `sglang_server.py KIND MODEL`.

KIND is `bare` (the least a handler can do), `ours` or `published`: the servicer of the package
that Python finds first, with its request manager, over a scheduler in a child
(`sglang_scheduler.py`). On standard input it takes `mode SECONDS LOAD` (between two steps) and
`cpu`, on standard output it tells its port, and then its CPU seconds whenever asked.
"""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import uvloop
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb
from smg_grpc_proto.generated import sglang_scheduler_pb2_grpc as pb_grpc

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
]
SOCKETS = ("tokenizer_ipc_name", "scheduler_input_ipc_name", "detokenizer_ipc_name")


class Bare(pb_grpc.SglangSchedulerServicer):
    """One ready message again and again: all at once, or one whenever the clock ticks."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._tick: asyncio.Future[None] | None = None

    def ticking(self) -> asyncio.Future[None]:
        """All streams wait for the same tick, as for a scheduler's step."""
        if self._tick is None:
            loop = asyncio.get_running_loop()
            self._tick = loop.create_future()
            loop.call_later(self.seconds, self._ticked)
        return self._tick

    def _ticked(self) -> None:
        tick, self._tick = self._tick, None
        assert tick is not None
        tick.set_result(None)

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        chunk = pb.GenerateStreamChunk(token_ids=[7], prompt_tokens=3, completion_tokens=9)
        count = request.top_logprobs_num
        if request.return_logprob:
            rows = chunk.output_logprobs
            rows.token_ids.append(7)
            rows.token_logprobs.append(-9.0)
            rows.top_logprobs.add(values=[-1.0] * count, token_ids=range(count))
        message = pb.GenerateResponse(chunk=chunk)
        for _ in range(request.sampling_params.max_new_tokens):
            if self.seconds:
                await self.ticking()
            yield message
        yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="length"))


def launched(model: str) -> tuple[Any, Any]:
    """SGLang's own arguments and ports, as its launcher has them when it calls a servicer."""
    from sglang.srt.runtime_context import publish
    from sglang.srt.server_args import PortArgs, prepare_server_args

    flags = ["--model-path", model, "--device", "cpu", "--dtype", "float32"]
    args = prepare_server_args(flags)
    args.tokenizer_path = model
    args.resolve_once()
    publish(args, role="tokenizer")
    return args, PortArgs.init_new(args)


async def ours(model: str, port_args: Any) -> Any:
    from sglang.srt.utils.hf_transformers_utils import get_tokenizer

    from smg_grpc_servicer.core.health import StatusBoard
    from smg_grpc_servicer.core.types import ModelFacts, ServerFacts
    from smg_grpc_servicer.sglang.adapter import SglangEngine
    from smg_grpc_servicer.sglang.limits import Limits
    from smg_grpc_servicer.sglang.request_manager import RequestManager
    from smg_grpc_servicer.sglang.servicer import SglangServicerBase
    from smg_grpc_servicer.sglang.sockets import Sockets

    async def loads() -> list[Any]:
        return []

    sockets = Sockets.bind(port_args, skip_tokenizer_init=False)
    manager = RequestManager(sockets, num_ranks=1, on_dead=print)
    await manager.start()
    engine = SglangEngine(
        manager,
        model_facts=ModelFacts(model, "m", max_context_length=1024, vocab_size=1024),
        server_facts=lambda: ServerFacts("grpc"),
        loads=loads,
        limits=Limits(max_prompt_tokens=1000),
        tokenizer=get_tokenizer(model),
    )
    board = StatusBoard()
    servicer = SglangServicerBase(engine, board)
    board.serving()
    return servicer


def published(args: Any, port_args: Any) -> Any:
    from sglang.srt.configs.model_config import ModelConfig

    from smg_grpc_servicer.sglang import request_manager
    from smg_grpc_servicer.sglang.servicer import SGLangSchedulerServicer

    theirs: Any = request_manager  # whose constructor is another than ours
    manager = theirs.GrpcRequestManager(args, port_args)
    manager.auto_create_handle_loop()
    config = ModelConfig.from_server_args(args)
    return SGLangSchedulerServicer(manager, args, config, {}, {"max_req_input_len": 1000})


async def main(kind: str, model: str) -> None:
    scheduler = None
    servicer: Any = Bare()
    if kind != "bare":
        args, port_args = launched(model)
        servicer = await ours(model, port_args) if kind == "ours" else published(args, port_args)
        ports = {name: getattr(port_args, name) for name in SOCKETS}
        scheduler = subprocess.Popen(  # noqa: ASYNC220 - before the clock starts
            [
                sys.executable,
                str(Path(__file__).with_name("sglang_scheduler.py")),
                json.dumps(ports),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert scheduler.stdout is not None
        await asyncio.to_thread(scheduler.stdout.readline)
        await asyncio.sleep(0.5)  # its sockets connect
    make: Any = grpc.aio.server
    if kind == "ours":
        from smg_grpc_servicer.core import wakeups

        make = wakeups.server
    server = make(options=OPTIONS)
    pb_grpc.add_SglangSchedulerServicer_to_server(servicer, server)
    print("port", server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    loop = asyncio.get_running_loop()
    while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        if words[0] == "mode" and scheduler is None:
            servicer.seconds = float(words[1]) if words[2] != "ahead" else 0.0
        elif words[0] == "mode":
            assert scheduler is not None
            assert scheduler.stdin is not None
            scheduler.stdin.write(words[1] + "\n")
            scheduler.stdin.flush()
        used = resource.getrusage(resource.RUSAGE_SELF)
        print("cpu", used.ru_utime + used.ru_stime, flush=True)
    await server.stop(0)
    if scheduler is not None:
        scheduler.kill()
        scheduler.wait()


if __name__ == "__main__":
    uvloop.run(main(*sys.argv[1:3]))
