"""A warm-up through vLLM's own objects: what reaches them, what is left of it."""

from __future__ import annotations

import asyncio

from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.vllm.failures import DEAD
from smg_grpc_servicer.vllm.warm_up import plan_of
from smg_grpc_servicer.warmup.inside import warm
from tests.support.stub_async_llm import StubAsyncLLM
from tests.support.vllm_config import vllm_config
from tests.support.vllm_served import served_vllm
from tests.support.wait import until

PLAN = plan_of(vllm_config(), "fast", [0])


async def test_it_stands_in_no_load() -> None:
    """Weak point 10: hit rate and throughput of the warm-up were what the router balanced by."""
    llm = StubAsyncLLM(cached=4)
    async with served_vllm(llm) as server:
        engine = server.servicer.engine
        outcome = await warm(engine, PLAN, 30)
        assert outcome.answered > 20
        assert outcome.failed == 0
        (row,) = (await server.stub.GetLoads(pb.GetLoadsRequest())).loads
        assert row.num_total_reqs == row.gen_throughput == row.cache_hit_rate == 0
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.active_requests == 0
        await server.generate(prompt=list(range(3, 11)))
        (row,) = (await server.stub.GetLoads(pb.GetLoadsRequest())).loads
        assert row.cache_hit_rate == 0.5


async def test_an_engine_that_dies_of_it_is_never_ready() -> None:
    """The watch looks now and then; readiness would come up in between."""
    llm = StubAsyncLLM()
    async with served_vllm(llm) as server:
        llm.dead = True
        outcome = await warm(server.servicer.engine, PLAN, 30)
        assert outcome.answered == 0
        assert server.servicer.board.death == DEAD


async def test_a_budget_that_is_over_leaves_nothing_at_the_engine() -> None:
    """Requests that were never answered are aborted there, before the first client comes."""
    llm = StubAsyncLLM(step=lambda: asyncio.sleep(3600))
    async with served_vllm(llm) as server:
        outcome = await warm(server.servicer.engine, PLAN, 0.2)
        assert outcome.ended == "its 0.2 s are over"
        await until(lambda: not llm.in_flight)
