"""A warm-up through SGLang's scheduler, over its stub."""

from __future__ import annotations

import asyncio

from sglang.srt.managers import io_struct as io

from smg_grpc_servicer.warmup.inside import warm
from smg_grpc_servicer.warmup.plan import Shape, make
from tests.support.sglang_served import served_sglang

PLAN = make("fast", Shape(64, 4000, 1000, window=4, ranks=(0, 1), reserve=6), opened=True)


async def test_every_rank_gets_its_requests_and_the_cache_is_flushed() -> None:
    async with served_sglang(serve=True, ranks=2) as server:
        server.scheduler.answers = {
            io.FlushCacheReqInput: lambda r: io.FlushCacheReqOutput(success=True)
        }
        outcome = await warm(server.engine, PLAN, 30)
        assert outcome.failed == 0
        *sent, flush = server.scheduler.received
        assert isinstance(flush, io.FlushCacheReqInput)
        assert len(sent) == outcome.answered
        assert all("smg-warmup-" in each.rid for each in sent)
        assert {each.routed_dp_rank for each in sent} == {0, 1}
        assert server.scheduler.aborts == []
        await server.idle()


async def test_a_scheduler_that_never_answers_is_told_to_stop() -> None:
    async with served_sglang(ranks=2) as server:
        outcome = await warm(server.engine, PLAN, 0.2)
        assert outcome.ended == "its 0.2 s are over"
        assert outcome.answered == 0
        await server.aborted(*(each.rid for each in server.scheduler.received))
        await server.idle()


async def test_a_stop_in_the_middle_leaves_nothing() -> None:
    async with served_sglang(ranks=2) as server:
        warming = asyncio.create_task(warm(server.engine, PLAN, 600))
        sent = await server.sent(8)
        warming.cancel()
        await asyncio.wait({warming}, timeout=5)
        assert warming.cancelled()
        await server.aborted(*(each.rid for each in sent))
        await server.idle()
