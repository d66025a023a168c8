"""The first request of a server that has just connected to its engine: is it answered at all?

One token, greedy, under an id that servers let in while they hold readiness back. It is also what
makes vLLM compile what its first step compiles. How warm a server has to be is not decided here.
"""

from __future__ import annotations

import logging

import grpc
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

log = logging.getLogger(__name__)

PROBE_ID = "smg-warmup-0"
PROBE_SECONDS = 300.0


async def probe(address: str) -> None:
    """Ask the server at `host:port` for one token."""
    request = vllm_engine_pb2.GenerateRequest(
        request_id=PROBE_ID,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=[0]),
        sampling_params=vllm_engine_pb2.SamplingParams(
            temperature=0.0, max_tokens=1, ignore_eos=True
        ),
    )
    async with grpc.aio.insecure_channel(address) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        try:
            async for _ in stub.Generate(request, timeout=PROBE_SECONDS):
                pass
        except grpc.aio.AioRpcError as error:
            log.warning("the warm-up request failed: %s %s", error.code().name, error.details())
        else:
            log.info("the warm-up request was answered")
