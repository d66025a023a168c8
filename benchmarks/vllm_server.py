"""One server of `vllm_servicer.py`, in a process of its own: `vllm_server.py bare|least|servicer`.

`servicer` is the VllmEngineServicer of the package that Python finds first, ours or the published
one, over the same stub of an engine; `least` hands requests to it and does nothing else. On
standard input it takes `mode NAME` and `cpu`, on standard output it tells its port, and then its
CPU seconds whenever asked. It ends with its input.
"""

from __future__ import annotations

import asyncio
import inspect
import resource
import sys
import time
from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any

import grpc
import uvloop
from smg_grpc_proto.generated import vllm_engine_pb2 as pb
from smg_grpc_proto.generated import vllm_engine_pb2_grpc as pb_grpc
from vllm.logprobs import FlatLogprobs, Logprob
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.sampling_params import RequestOutputKind, SamplingParams
from vllm.v1.engine.output_processor import RequestOutputCollector

from tests.support.stub_async_llm import StubAsyncLLM

PACE_SECONDS = 0.005
"""A step of a paced engine."""

BURST = 8
"""vLLM's output loop goes through all steps that are there before anybody else runs."""

OPTIONS = [
    ("grpc.max_send_message_length", -1),
    ("grpc.max_receive_message_length", -1),
    ("grpc.so_reuseport", 0),
]


class BenchLLM(StubAsyncLLM):
    """Four engines in one.

    - `instant`: all of an answer is there at once, an output for every token; what an output
      costs to make is paid once
    - `requests`: the same for answers of one output, which come through vLLM's own collector in
      both ways of asking, as in `AsyncLLM`
    - `steps`: one token a step to every request, through vLLM's own collector, which merges; the
      engine is ahead, so `BURST` steps have queued up for each turn of the loop
    - `paced`: a step every `PACE_SECONDS`
    """

    mode = "steps"

    def __init__(self) -> None:
        super().__init__()
        self._step = self._wait
        self._done = 0
        self._ready: dict[tuple[int, int | None, bool], list[RequestOutput]] = {}
        # What the published servicer asks an engine for, beside what ours does.
        self.model_config = self.vllm_config.model_config
        self.renderer = SimpleNamespace(process_for_engine=lambda prompt, arrival_time: prompt)

    async def _wait(self) -> None:
        self._done += 1
        if self.mode == "paced":
            await asyncio.sleep(PACE_SECONDS)
        elif self._done % BURST == 0:
            await asyncio.sleep(0)

    async def add_request(
        self, request_id: str, prompt: Any, params: Any, *args: Any, **options: Any
    ) -> RequestOutputCollector:
        if self.mode not in ("instant", "requests"):
            return await super().add_request(request_id, prompt, params, *args, **options)
        collector = RequestOutputCollector(params.output_kind, request_id)
        asyncio.get_running_loop().call_soon(self._feed, collector, params)
        return collector

    def _advance(self, key: str, running: Any) -> None:
        """A step's output is a copy: making one is the engine's work, not the servicer's."""
        made = running.made[0]
        running.made[0] = made + 1
        output = _copied(self._outputs(running.params)[made])
        if output.finished:
            del self._running[key]
        running.collector.put(output)

    def _feed(self, collector: RequestOutputCollector, params: Any) -> None:
        for output in self._outputs(params):
            collector.put(output)

    async def generate(  # type: ignore[override]
        self, prompt: Any, sampling_params: Any, request_id: str, **options: Any
    ) -> AsyncIterator[RequestOutput]:
        if self.mode == "instant":
            for output in self._outputs(sampling_params):
                yield output
            return
        async for output in super().generate(prompt, sampling_params, request_id, **options):
            yield output

    def _outputs(self, params: Any) -> list[RequestOutput]:
        key = (params.max_tokens, params.logprobs, bool(params.flat_logprobs))
        if key not in self._ready:
            self._ready[key] = [_output(at, *key) for at in range(params.max_tokens)]
        return self._ready[key]


def _output(at: int, count: int, logprobs: int | None, flat: bool) -> RequestOutput:
    over = at == count - 1
    return RequestOutput(
        request_id="ready",
        prompt=None,
        prompt_token_ids=[5, 6, 7],
        prompt_logprobs=None,
        outputs=[
            CompletionOutput(
                index=0,
                text="",
                token_ids=[3 + at % 900],
                cumulative_logprob=None,
                logprobs=None if logprobs is None else _rows(3 + at % 900, logprobs, flat),
                finish_reason="length" if over else None,
            )
        ],
        finished=over,
        num_cached_tokens=0,
    )


def _copied(output: RequestOutput) -> RequestOutput:
    """Of its own as deep as vLLM's collector changes it when it merges."""
    copy, part = RequestOutput.__new__(RequestOutput), CompletionOutput.__new__(CompletionOutput)
    part.__dict__.update(output.outputs[0].__dict__)
    part.token_ids = list(part.token_ids)
    copy.__dict__.update(output.__dict__)
    copy.outputs = [part]
    return copy


def _rows(token: int, count: int, flat: bool) -> Any:
    entries = {token: Logprob(-9.0, 500)}
    entries |= {(token + 1 + i) % 1000: Logprob(-1.0 - i, i + 1) for i in range(count)}
    if not flat:
        return [entries]
    rows = FlatLogprobs()
    rows.append(entries)
    return rows


class Bare(pb_grpc.VllmEngineServicer):
    """The least a streaming handler can do: one ready message again and again."""

    async def Generate(self, request: Any, context: Any) -> AsyncIterator[Any]:
        chunk = pb.GenerateStreamChunk(token_ids=[7], prompt_tokens=3, completion_tokens=9)
        count = request.sampling_params.logprobs
        if count:
            rows = chunk.output_logprobs
            rows.token_ids.append(7)
            rows.token_logprobs.append(-9.0)
            rows.top_logprobs.add(values=[-1.0] * count, token_ids=range(count))
        message = pb.GenerateResponse(chunk=chunk)
        for _ in range(request.sampling_params.max_tokens):
            yield message
        yield pb.GenerateResponse(complete=pb.GenerateComplete(finish_reason="length"))


def least(llm: BenchLLM) -> pb_grpc.VllmEngineServicer:
    """No id is looked at, no field checked, nothing counted, cancelled or aborted."""
    from smg_grpc_servicer.core.handlers import last_from

    class Least(pb_grpc.VllmEngineServicer):
        @last_from("answer")
        async def Generate(self, request: Any, context: Any) -> None:
            await context.write(await self.answer(request, context))

        async def answer(self, request: Any, context: Any) -> bytes:
            params = SamplingParams(
                max_tokens=request.sampling_params.max_tokens,
                output_kind=RequestOutputKind.DELTA,
                detokenize=False,
            )
            prompt = {"type": "token", "prompt_token_ids": list(request.tokenized.input_ids)}
            collector = await llm.add_request(request.request_id, prompt, params)
            finished = False
            while not finished:
                output = collector.get_nowait() or await collector.get()
                finished = output.finished
                chunk = pb.GenerateStreamChunk(token_ids=output.outputs[0].token_ids)
                await context.write(pb.GenerateResponse(chunk=chunk).SerializeToString())
            complete = pb.GenerateComplete(finish_reason="length")
            return pb.GenerateResponse(complete=complete).SerializeToString()

    return Least()


async def main(kind: str) -> None:
    llm = BenchLLM()
    servicer: Any = Bare()
    make: Any = grpc.aio.server
    if kind == "least":
        from smg_grpc_servicer.core import wakeups

        make, servicer = wakeups.server, least(llm)
    if kind == "servicer":
        from smg_grpc_servicer.vllm.servicer import VllmEngineServicer

        if "coalesce_seconds" in inspect.signature(VllmEngineServicer).parameters:  # it is ours
            from smg_grpc_servicer.core import wakeups

            make = wakeups.server
        servicer = VllmEngineServicer(llm, time.time())
    server = make(options=OPTIONS)
    pb_grpc.add_VllmEngineServicer_to_server(servicer, server)
    print("port", server.add_insecure_port("127.0.0.1:0"), flush=True)
    await server.start()
    loop = asyncio.get_running_loop()
    while words := (await loop.run_in_executor(None, sys.stdin.readline)).split():
        if words[0] == "mode":
            llm.mode = words[1]
        used = resource.getrusage(resource.RUSAGE_SELF)
        print("cpu", used.ru_utime + used.ru_stime, flush=True)
    await server.stop(0)
    llm.shutdown()


if __name__ == "__main__":
    uvloop.run(main(sys.argv[1]))
