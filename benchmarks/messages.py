"""What a streamed message costs the server, beside a bare grpc.aio handler, in one run.

    python benchmarks/messages.py [--streams 1,64,256] [--rounds 3]

Three servers take turns under the same client: a handler that yields one ready message again and
again; ours held to one token per message; ours sending what has piled up together. Both of ours
have an engine that is faster than the writer: eight tokens a step. CPU is the server process's own.
Streams have 300 tokens and more, so that messages count; `vllm_servicer.py` has short requests.
"""

from __future__ import annotations

import argparse
import asyncio
import multiprocessing
import resource
import statistics
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from multiprocessing.connection import Connection
from time import perf_counter
from typing import Any

import grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from smg_grpc_proto.generated import mlx_engine_pb2_grpc as pb_grpc

from smg_grpc_servicer.core import wakeups
from smg_grpc_servicer.core.binding import channel_options
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.process import run
from smg_grpc_servicer.mlx.servicer import MlxEngineServicer
from smg_grpc_servicer.testing import FakeEngine

STEP = 8
"""Tokens of a step of the engine."""

KINDS = ("bare", "one token", "piled up")


@dataclass(frozen=True)
class Result:
    """One load on one server."""

    messages: int
    tokens: int
    seconds: float
    cpu: float

    @property
    def rate(self) -> float:
        return self.messages / self.seconds

    @property
    def cpu_us(self) -> float:
        return self.cpu / self.messages * 1e6

    @property
    def tokens_per_cpu(self) -> float:
        return self.tokens / self.cpu


class Bare(pb_grpc.MlxEngineServicer):
    """The least a streaming handler can do."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        message = pb.GenerateResponse(
            chunk=pb.GenerateStreamChunk(token_ids=[7], prompt_tokens=3, completion_tokens=9)
        )
        for _ in range(request.sampling_params.max_tokens):
            yield message


def serve(kind: str, pipe: Connection) -> None:
    """A server process: tells its port, then its CPU seconds whenever asked, until told to end."""

    async def main() -> int:
        make: Any = grpc.aio.server if kind == "bare" else wakeups.server
        server = make(options=channel_options(2**29, 2**29))
        engine = FakeEngine(tokens_per_step=STEP)
        engine.facts = type(engine.facts)(model_path="fake", served_model_name="fake")
        if kind == "bare":
            servicer: Any = Bare()
        else:
            board = StatusBoard()
            one = 1 if kind == "one token" else None
            servicer = MlxEngineServicer(engine, board, max_chunk_tokens=one)
            await engine.start()
            board.serving()
        pb_grpc.add_MlxEngineServicer_to_server(servicer, server)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        over = asyncio.Event()
        threading.Thread(
            target=answer, args=(asyncio.get_running_loop(), over), daemon=True
        ).start()
        pipe.send(port)
        await over.wait()
        await server.stop(0)
        await engine.close()
        return 0

    def answer(loop: asyncio.AbstractEventLoop, over: asyncio.Event) -> None:
        while pipe.recv() == "cpu":
            used = resource.getrusage(resource.RUSAGE_SELF)
            pipe.send(used.ru_utime + used.ru_stime)
        loop.call_soon_threadsafe(over.set)

    raise SystemExit(run(main))


async def load(port: int, streams: int, tokens: int, pipe: Connection) -> Result:
    """All streams at once, each `tokens` long."""
    messages = seen = 0

    async def one(stub: Any, index: int) -> None:
        nonlocal messages, seen
        request = pb.GenerateRequest(
            request_id=f"r{index}",
            tokenized=pb.TokenizedInput(input_ids=[5, 6, 7]),
            sampling_params=pb.SamplingParams(max_tokens=tokens),
            stream=True,
        )
        async for message in stub.Generate(request):
            messages += 1
            seen += len(message.chunk.token_ids)

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = pb_grpc.MlxEngineStub(channel)
        await one(stub, -1)
        messages = seen = 0
        pipe.send("cpu")
        before = pipe.recv()
        start = perf_counter()
        await asyncio.gather(*(one(stub, index) for index in range(streams)))
        seconds = perf_counter() - start
        pipe.send("cpu")
        return Result(messages, seen, seconds, float(pipe.recv()) - before)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--streams", default="1,64,256", help="how many at once (1,64,256)")
    parser.add_argument(
        "--messages", type=int, default=80_000, help="about, for each server (80,000)"
    )
    parser.add_argument("--rounds", type=int, default=3, help="each; the median counts (3)")
    args = parser.parse_args()
    counts = [int(part) for part in args.streams.split(",")]
    spawn = multiprocessing.get_context("spawn")
    servers = {}
    for kind in KINDS:
        here, there = spawn.Pipe()
        process = spawn.Process(target=serve, args=(kind, there), daemon=True)
        process.start()
        servers[kind] = (process, here, here.recv())
    print(
        "| streams | server | messages/s | CPU us/message | tokens/CPU s "
        "| rate, of bare | tokens/CPU s, of one token |"
    )
    print("|---|---|---|---|---|---|---|")
    for streams in counts:
        results: dict[str, list[Result]] = {kind: [] for kind in KINDS}
        for _ in range(args.rounds):
            for kind, (_, pipe, port) in servers.items():
                tokens = max(10, args.messages // streams)
                results[kind].append(asyncio.run(load(port, streams, tokens, pipe)))
        for kind in KINDS:
            report(streams, kind, results)
    for process, pipe, _ in servers.values():
        pipe.send("end")
        process.join(10)


def report(streams: int, kind: str, results: dict[str, list[Result]]) -> None:
    def median(of: str, value: str) -> float:
        return float(statistics.median(getattr(result, value) for result in results[of]))

    # Rounds stand beside each other, so a ratio is taken round by round.
    of_bare = statistics.median(
        mine.rate / bare.rate for mine, bare in zip(results[kind], results["bare"], strict=True)
    )
    of_one = statistics.median(
        mine.tokens_per_cpu / one.tokens_per_cpu
        for mine, one in zip(results[kind], results["one token"], strict=True)
    )
    print(
        f"| {streams} | {kind} | {median(kind, 'rate'):.0f} | {median(kind, 'cpu_us'):.1f} "
        f"| {median(kind, 'tokens_per_cpu'):.0f} | {of_bare:.2f} | {of_one:.1f} |",
        flush=True,
    )


if __name__ == "__main__":
    main()
