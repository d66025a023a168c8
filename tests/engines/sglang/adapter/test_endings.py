"""However a request ends, the scheduler hears of it once and nothing of it is left here."""

from __future__ import annotations

import asyncio
import random
from time import monotonic
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core import failpoints
from smg_grpc_servicer.core.types import ModelFacts
from smg_grpc_servicer.sglang.limits import Limits
from tests.support.sglang_served import ServedSglang, request, served_sglang
from tests.support.sglang_stub import Row, abort, batch, embeddings, stop
from tests.support.wait import until

CODE = grpc.StatusCode
EMBEDDING = ModelFacts("/m", "m", is_generation=False, max_context_length=64, vocab_size=1000)


async def begun(server: ServedSglang, **fields: Any) -> tuple[Any, Any]:
    """A call that has had its first chunk, and the scheduler's message."""
    before = len(server.scheduler.received)
    call = server.stub.Generate(request(**fields))
    sent = (await server.sent(before + 1))[before]
    await server.scheduler.say(batch(Row(sent.rid, [9], completion_tokens=1)))
    await anext(aiter(call))
    return call, sent


async def test_row_8_a_client_that_leaves_between_two_outputs_stops_the_scheduler() -> None:
    """§11-8: also when nobody waits for an output at that moment; within 100 ms."""
    async with served_sglang() as server:
        call, sent = await begun(server)
        call.cancel()
        start = monotonic()
        await server.aborted(sent.rid)
        assert monotonic() - start < 0.5
        await server.idle()


@pytest.mark.parametrize("point", failpoints.NAMES)
@pytest.mark.parametrize("choices", [1, 2])
async def test_a_cancel_at_any_await_stops_what_was_begun(point: str, choices: int) -> None:
    """C3: what the scheduler has is stopped exactly once, what it has not is never named."""
    async with served_sglang(serve=True) as server:
        held = asyncio.Event()

        async def hold() -> None:
            held.set()
            await asyncio.Event().wait()

        with failpoints.arm(point, hold):
            call = server.stub.Generate(request(params={"n": choices, "max_new_tokens": 3}))
            reading = asyncio.ensure_future(_read(call))
            await asyncio.wait_for(held.wait(), 5)
            call.cancel()
            await reading
            await server.idle()
        await until(lambda: not server.scheduler.running)
        known = {message.rid for message in server.scheduler.received}
        assert len(server.scheduler.aborts) == len(set(server.scheduler.aborts))
        assert set(server.scheduler.aborts) <= known


async def _read(call: Any) -> None:
    try:
        async for _ in call:
            pass
    except (asyncio.CancelledError, grpc.RpcError):
        pass


async def test_a_cancel_during_the_pass_over_the_prompt_stops_it() -> None:
    async with served_sglang() as server:
        call = server.stub.Generate(request(params={"n": 2}, prompt=[5] * 1024))
        (sent,) = await server.sent()
        call.cancel()
        await server.aborted(sent.rid)
        await server.idle()
        await server.scheduler.say(batch(Row(sent.rid, [], stop())))
        await asyncio.sleep(0.05)
        assert len(server.scheduler.received) == 1


async def test_an_abort_of_one_id_never_touches_one_that_begins_the_same() -> None:
    """`req-1` and `req-10`: the scheduler compares by prefix, whose ids are ours."""
    async with served_sglang(serve=True) as server:
        params = {"max_new_tokens": 3000}
        calls = {
            name: server.stub.Generate(request(name, params=params))
            for name in ("req-1", "req-10", "req", "1", "2.0:req-1")
        }
        for call in calls.values():
            await anext(aiter(call))
        await server.stub.Abort(pb.AbortRequest(request_id="req-1"))
        await until(lambda: len(server.scheduler.running) == 4)
        await asyncio.sleep(0.05)
        assert len(server.scheduler.running) == 4
        for call in calls.values():
            call.cancel()
        await server.idle()


async def test_row_35_a_client_may_call_itself_a_health_check_and_is_served() -> None:
    """§11-35: the scheduler drops ids that begin so, and no abort would reach them."""
    async with served_sglang() as server:
        call, sent = await begun(server, request_id="HEALTH_CHECK_1")
        assert not sent.rid.startswith("HEALTH_CHECK")
        await server.stub.Abort(pb.AbortRequest(request_id="HEALTH_CHECK_1"))
        await server.aborted(sent.rid)
        await _read(call)


async def test_a_thousand_requests_with_cancels_leave_nothing() -> None:
    """One in ten is cancelled at some point: all tables and the scheduler return to zero."""
    chance = random.Random(6)
    async with served_sglang(serve=True) as server:

        async def one(at: int) -> None:
            choices = 2 if at % 7 == 0 else 1
            fields = {"n": choices, "max_new_tokens": chance.randint(1, 20)}
            call = server.stub.Generate(request(f"req-{at}", params=fields, stream=at % 2 == 0))
            if at % 10 == 0:
                asyncio.get_running_loop().call_later(chance.random() * 0.05, call.cancel)
            await _read(call)

        for start in range(0, 1000, 100):
            await asyncio.gather(*(one(at) for at in range(start, start + 100)))
        await server.idle()
        await until(lambda: not server.scheduler.running)
        assert server.engine.statistics().keys() >= {"running", "requests", "control_calls"}


async def test_row_25_a_cancelled_embed_stops_the_scheduler_and_nothing_breaks() -> None:
    """§11-25: its late answer is nobody's."""
    async with served_sglang(facts=EMBEDDING) as server:
        call = server.stub.Embed(_embed())
        (sent,) = await server.sent()
        call.cancel()
        await server.aborted(sent.rid)
        await server.idle()
        await server.scheduler.say(embeddings((sent.rid, [0.5])))
        reading = server.stub.Embed(_embed("again"))
        sent = (await server.sent(2))[1]
        await server.scheduler.say(embeddings((sent.rid, [0.25, 0.5])))
        answer = await reading
        assert (list(answer.embedding), answer.embedding_dim) == ([0.25, 0.5], 2)
        await server.idle()


def _embed(request_id: str = "e", ids: Any = (5, 6, 7)) -> Any:
    return pb.EmbedRequest(request_id=request_id, tokenized={"input_ids": ids})


@pytest.mark.parametrize(
    ("found", "expected"),
    [(0.5, [0.5]), ([[0.5, 0.25]], [0.5, 0.25]), ({7: 0.5}, "sparse"), ([[1.0], [2.0]], "2 vec")],
)
async def test_row_26_an_embedding_of_another_kind(found: Any, expected: Any) -> None:
    """§11-26: a score is a vector of one; what the proto cannot carry is refused in words."""
    async with served_sglang(facts=EMBEDDING) as server:
        call = server.stub.Embed(_embed())
        (sent,) = await server.sent()
        await server.scheduler.say(embeddings((sent.rid, found)))
        if isinstance(expected, str):
            with pytest.raises(grpc.aio.AioRpcError, match=expected) as caught:
                await call
            assert caught.value.code() is CODE.FAILED_PRECONDITION
        else:
            assert list((await call).embedding) == expected
        await server.idle()


async def test_an_embed_that_the_scheduler_refuses() -> None:
    from sglang.srt.managers.io_struct import AbortReq

    async with served_sglang(facts=EMBEDDING) as server:
        call = server.stub.Embed(_embed())
        (sent,) = await server.sent()
        reason = abort("The request queue is full.", 503)
        await server.scheduler.say_aside(AbortReq(rid=sent.rid, finished_reason=reason))
        with pytest.raises(grpc.aio.AioRpcError, match="queue is full") as caught:
            await call
        assert caught.value.code() is CODE.UNAVAILABLE


async def test_rows_22_and_23_a_broken_socket_fails_every_stream_and_is_told() -> None:
    """§11-22 and 23: UNAVAILABLE at once, `on_dead` once, readiness down, new requests refused."""
    async with served_sglang() as server:
        calls = [await begun(server, request_id=f"r-{at}") for at in range(3)]
        waiting = asyncio.ensure_future(server.stub.FlushCache(_flush()))
        await server.sent(4)
        server.manager._sockets._inbound[0].close(linger=0)
        server.manager._sockets._drain(server.manager._sockets._inbound[0])
        for call, _ in calls:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                async for _ in call:
                    pass
            assert caught.value.code() is CODE.UNAVAILABLE
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await waiting
        assert caught.value.code() is CODE.UNAVAILABLE
        assert len(server.dead) == 1
        assert "connection to the scheduler broke" in server.dead[0]
        assert not server.board.ready
        history = await server.generate(request("new"))
        assert history.code is CODE.UNAVAILABLE
        await server.idle()


def _flush() -> Any:
    from smg_grpc_proto.generated import common_pb2

    return common_pb2.FlushCacheRequest()


async def test_a_message_that_cannot_be_read_ends_everything_in_words(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Whose it was is not known, so somebody would wait for ever."""
    async with served_sglang() as server:
        call, _ = await begun(server)
        server.scheduler.detokenizer.send(b"\x00 no pickle")
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is CODE.UNAVAILABLE
        assert len(server.dead) == 1


async def test_a_row_that_cannot_be_understood_ends_that_request_only() -> None:
    async with served_sglang() as server:
        bad, bad_sent = await begun(server, request_id="bad")
        good, good_sent = await begun(server, request_id="good")
        await server.scheduler.say(
            batch(
                Row(bad_sent.rid, [1], {"no": "type"}),
                Row(good_sent.rid, [2], stop(), completion_tokens=2),
            )
        )
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in bad:
                pass
        assert caught.value.code() is CODE.INTERNAL
        ends = [message async for message in good]
        assert list(ends[-1].complete.output_ids) == [9, 2]
        await server.aborted(bad_sent.rid)
        await server.idle()


async def test_row_38_a_stream_keeps_nothing_that_was_sent() -> None:
    """§11-38: what waits is bounded by what the reader has not taken."""
    async with served_sglang(limits=Limits()) as server:
        call, sent = await begun(server, params={"max_new_tokens": 4000})
        for at in range(50):
            await server.scheduler.say(batch(Row(sent.rid, [at], completion_tokens=at + 2)))
            await anext(aiter(call))
        await until(lambda: server.servicer.statistics()["pending"] == 0)
        call.cancel()


async def test_a_scheduler_that_is_not_there_is_unavailable() -> None:
    """Nothing blocks the loop: the socket has no peer to send to."""
    async with served_sglang() as server:
        await server.scheduler.close()

        async def gone() -> bool:
            history = await server.generate(request(f"r-{monotonic()}"))
            return history.code is CODE.UNAVAILABLE

        call = asyncio.ensure_future(asyncio.wait_for(_until_gone(gone), 5))
        await call
        await server.idle()


async def _until_gone(gone: Any) -> None:
    while True:
        try:
            if await asyncio.wait_for(gone(), 0.3):
                return
        except asyncio.TimeoutError:
            continue


async def test_row_30_closing_with_unsent_messages_does_not_block() -> None:
    """§11-30: linger 0, and the context ends off the loop."""
    async with served_sglang() as server:
        await begun(server)
        start = monotonic()
        await server.manager.close("stopping")
        assert monotonic() - start < 1.0
