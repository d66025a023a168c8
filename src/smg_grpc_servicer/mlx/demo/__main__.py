"""`python -m smg_grpc_servicer.mlx.demo [QUESTION]`: the whole road once, on the embedded model.

Starts the server as a child on a free port, waits until it is SERVING, streams one answer as text,
prints the usage, and stops the server. The exit code is the server's, 1 when the answer failed.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import re
import signal
import sys
from collections.abc import AsyncIterator
from time import perf_counter
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from smg_grpc_proto.generated import mlx_engine_pb2 as pb
from smg_grpc_proto.generated import mlx_engine_pb2_grpc as pb_grpc

from smg_grpc_servicer.core.binding import TO_OURSELVES
from smg_grpc_servicer.mlx import demo

SERVICE = "mlx.grpc.engine.MlxEngine"
START_SECONDS = 120.0
LISTENING = re.compile(r"listening on grpc://(\S+)")


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m smg_grpc_servicer.mlx.demo",
        description="Serve the embedded model, stream one answer from it, stop.",
    )
    first = demo.examples()[0].question
    parser.add_argument("question", nargs="?", default=first, help=f"what to ask ({first!r})")
    args = parser.parse_args()
    try:
        raise SystemExit(asyncio.run(run(args.question)))
    except KeyboardInterrupt:
        raise SystemExit(128 + signal.SIGINT) from None


async def run(question: str) -> int:
    """Serve, ask, stop; the exit code."""
    command = [sys.executable, "-m", "smg_grpc_servicer.mlx", "--model", "demo", "--port", "0"]
    print("$", " ".join(["python", *command[1:]]), flush=True)
    child = await asyncio.create_subprocess_exec(*command, stderr=asyncio.subprocess.PIPE)
    try:
        async with started(child) as address:
            await ask(address, question)
    except (grpc.RpcError, RuntimeError, asyncio.TimeoutError) as error:
        why = error.details() if isinstance(error, grpc.aio.AioRpcError) else error
        print(f"the demo failed: {why}", file=sys.stderr)
        await end(child)
        return 1
    return await end(child)


@contextlib.asynccontextmanager
async def started(child: asyncio.subprocess.Process) -> AsyncIterator[str]:
    """The address of a server child once it is SERVING; its log is shown as it comes."""
    found: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    log = asyncio.create_task(show_log(child, found))
    try:
        address = await asyncio.wait_for(found, START_SECONDS)
        await asyncio.wait_for(until_serving(address), START_SECONDS)
        yield address
    finally:
        if child.returncode is None:
            child.terminate()
        await log


async def show_log(child: asyncio.subprocess.Process, found: asyncio.Future[str]) -> None:
    assert child.stderr is not None
    async for line in child.stderr:
        text = line.decode(errors="replace").rstrip()
        print("  |", text, flush=True)
        match = LISTENING.search(text)
        if match and not found.done():
            found.set_result(match[1])
    if not found.done():
        found.set_exception(RuntimeError("the server ended before it listened"))


async def until_serving(address: str) -> None:
    async with grpc.aio.insecure_channel(address, options=TO_OURSELVES) as channel:
        watch = health_pb2_grpc.HealthStub(channel).Watch(
            health_pb2.HealthCheckRequest(service=SERVICE)
        )
        async for answer in watch:
            if answer.status == health_pb2.HealthCheckResponse.SERVING:
                return


async def ask(address: str, question: str) -> None:
    """Stream one answer and print it as it arrives."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(demo.path() / "tokenizer.json"))
    prompt = f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    request = pb.GenerateRequest(
        request_id="demo",
        tokenized=pb.TokenizedInput(input_ids=tokenizer.encode(prompt).ids),
        sampling_params=pb.SamplingParams(temperature=0.0, max_tokens=128),
        stream=True,
    )
    print(f"\n> {question}", flush=True)
    ids: list[int] = []
    shown = 0
    begin = perf_counter()
    complete: Any = None
    async with grpc.aio.insecure_channel(address, options=TO_OURSELVES) as channel:
        async for message in pb_grpc.MlxEngineStub(channel).Generate(request):
            if message.WhichOneof("response") == "complete":
                complete = message.complete
                continue
            ids += message.chunk.token_ids
            # Decoded from the start each time: a character may take several tokens.
            text = tokenizer.decode(ids)
            if not text.endswith("\N{REPLACEMENT CHARACTER}"):
                print(text[shown:], end="", flush=True)
                shown = len(text)
    if complete is None:
        raise RuntimeError("the stream ended without its complete message")
    seconds = perf_counter() - begin
    print(
        f"\n\nusage: {complete.prompt_tokens} prompt tokens, {complete.completion_tokens} "
        f"completion tokens, finish reason {complete.finish_reason}, {seconds * 1000:.0f} ms\n",
        flush=True,
    )


async def end(child: asyncio.subprocess.Process) -> int:
    code = await asyncio.wait_for(child.wait(), START_SECONDS)
    print(f"the server ended with exit code {code}", flush=True)
    return code


if __name__ == "__main__":
    main()
