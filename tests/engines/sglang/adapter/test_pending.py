"""The prefill work in hand, as load records tell it: prompts that have no output yet."""

from __future__ import annotations

import asyncio
import time

import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.types import ModelFacts
from smg_grpc_servicer.sglang import kv_events
from smg_grpc_servicer.sglang.limits import Limits
from tests.support.sglang_served import LIMITS, ServedSglang, request, served_sglang
from tests.support.sglang_stub import Row, batch, embeddings, stop
from tests.support.wait import until

LONG = [5] * 40


def pending(server: ServedSglang) -> int:
    return server.engine.pending_prompt_tokens


async def test_a_prompt_is_pending_until_its_first_output() -> None:
    async with served_sglang() as server:
        calls = [
            asyncio.ensure_future(server.generate(request(name, prompt=ids)))
            for name, ids in (("long", LONG), ("short", [5, 6]))
        ]
        long, short = sorted(await server.sent(2), key=lambda sent: -len(sent.input_ids))
        assert pending(server) == 42
        await server.scheduler.say(batch(Row(long.rid, [9], completion_tokens=1)))
        await until(lambda: pending(server) == 2)
        await server.scheduler.say(batch(Row(long.rid, [8], stop(), completion_tokens=2)))
        await server.scheduler.say(batch(Row(short.rid, [8], stop(), completion_tokens=1)))
        await asyncio.gather(*calls)
        assert pending(server) == 0
        await server.idle()


@pytest.mark.parametrize("shared", [False, True])
async def test_choices_have_one_prompt(shared: bool) -> None:
    """Whether a pass over the prompt alone comes first or not."""
    ids = [5] * (2000 if shared else 20)
    async with served_sglang(limits=LIMITS) as server:
        call = server.stub.Generate(request(prompt=ids, params={"n": 2}))
        (first, *_) = await server.sent(1 if shared else 2)
        assert pending(server) == len(ids)
        ended = stop() if shared else None
        await server.scheduler.say(batch(Row(first.rid, [9], ended, completion_tokens=1)))
        await until(lambda: pending(server) == 0)
        await server.sent(3 if shared else 2)
        assert pending(server) == 0
        call.cancel()
        await server.idle()


async def test_embeddings_count_and_so_do_rows_instead_of_ids() -> None:
    facts = ModelFacts("/m", "m", is_generation=False, max_context_length=64, vocab_size=1000)
    async with served_sglang(facts=facts) as server:
        asked = pb.EmbedRequest(request_id="e", tokenized={"input_ids": [5, 6, 7]})
        call = asyncio.ensure_future(server.stub.Embed(asked))
        (sent,) = await server.sent()
        assert pending(server) == 3
        await server.scheduler.say(embeddings((sent.rid, [0.5])))
        await call
        assert pending(server) == 0
    async with served_sglang(limits=Limits(prefix_cache=False, hidden_size=2)) as server:
        rows = pb.GenerateRequest(request_id="r", input_embeds=[0.5] * 8, stream=True)
        stream = server.stub.Generate(rows)
        await server.sent()
        assert pending(server) == 4
        stream.cancel()
        await until(lambda: pending(server) == 0)


async def test_load_records_tell_it() -> None:
    async with served_sglang() as server:
        call = server.stub.Generate(request(prompt=LONG))
        await server.sent()
        sampler = kv_events.sampler(
            server.engine, server.servicer.table, lambda: [time.monotonic()]
        )
        told = sampler._activity()
        assert told.prefill_pending_tokens == len(LONG)
        assert told.reports_steps
        call.cancel()
