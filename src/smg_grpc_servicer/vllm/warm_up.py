"""What of vLLM is warmed up, on both paths: through the Rust server's own port, or in process.

vLLM captures its graphs by itself while it loads; what is left to a first use is kernels that are
tuned or compiled for a shape. On a CPU, and with `--enforce-eager`, there is next to none of it.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import grpc
from smg_grpc_proto.generated import common_pb2, vllm_engine_pb2, vllm_engine_pb2_grpc

from smg_grpc_servicer.core.binding import TO_OURSELVES
from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.vllm.probe import positive, probe
from smg_grpc_servicer.vllm.requests import has_kv_connector, managed_ranks
from smg_grpc_servicer.warmup import inside
from smg_grpc_servicer.warmup.plan import NOTHING, Plan, Request, Shape, make
from smg_grpc_servicer.warmup.run import FLUSH_SECONDS, run
from smg_grpc_servicer.warmup.setting import WarmUpBudget

log = logging.getLogger(__name__)


def plan_of(vllm_config: Any, level: str, ranks: Sequence[int]) -> Plan:
    """For a generating model on `ranks`, global ids."""
    if level == "auto" and has_kv_connector(vllm_config):
        # Some read an address in every request's id, and end their engine over one without.
        log.info("warm-up: nothing, beside a KV connector")
        return NOTHING
    pointless = None
    if probe(vllm_config, "device_config.device_type") == "cpu":
        pointless = "on a CPU there is no more to make"
    elif probe(vllm_config, "model_config.enforce_eager"):
        pointless = "--enforce-eager leaves no more to make"
    captured = probe(vllm_config, "compilation_config.cudagraph_capture_sizes")
    return make(
        level,
        Shape(
            step_tokens=positive(vllm_config, "scheduler_config.max_num_batched_tokens"),
            context=positive(vllm_config, "model_config.max_model_len"),
            vocab=vllm_config.model_config.get_vocab_size(),
            window=positive(vllm_config, "scheduler_config.max_num_seqs"),
            captured=tuple(captured) if isinstance(captured, list) else (),
            ranks=tuple(ranks) if len(ranks) > 1 else (),
        ),
        pointless,
    )


async def in_process(budget: WarmUpBudget, async_llm: Any, engine: Engine) -> None:
    """Through an engine that no client can reach yet."""
    if engine.model_facts().is_generation:
        plan = plan_of(async_llm.vllm_config, budget.level, managed_ranks(async_llm))
        await inside.warm(engine, plan, budget.seconds)


async def over_grpc(plan: Plan, seconds: float, address: str) -> None:
    """Through the server at `host:port`, which lets in these ids while it is not ready."""
    async with grpc.aio.insecure_channel(address, options=TO_OURSELVES) as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)

        async def send(request: Request) -> None:
            async for answer in stub.Generate(_generate(request)):
                if answer.complete.finish_reason in ("abort", "error"):
                    raise RuntimeError(f"it ended with {answer.complete.finish_reason!r}")

        async def flush() -> None:
            answer = await stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=FLUSH_SECONDS))
            if not answer.success:
                raise RuntimeError(answer.message)

        await run(plan, send, seconds=seconds, flush=flush)


def _generate(request: Request) -> vllm_engine_pb2.GenerateRequest:
    return vllm_engine_pb2.GenerateRequest(
        request_id=request.request_id,
        tokenized=vllm_engine_pb2.TokenizedInput(input_ids=request.prompt),
        sampling_params=vllm_engine_pb2.SamplingParams(
            temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True
        ),
        data_parallel_rank=request.rank,
    )
