"""A scheduler that says what it should not: who is meant hears of it, and nobody waits for ever."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sglang.srt.managers import io_struct as io
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.testing.history import History, check
from tests.support.sglang_served import ServedSglang, request, served_sglang
from tests.support.sglang_stub import Row, abort, batch, embeddings, stop
from tests.support.wait import until

CODE = grpc.StatusCode
REQUESTS = 3

ENDS: Sequence[Any] = (None, stop(), abort(), abort("no", 400), {"no": "type"}, {"type": 7}, "stop")
REASONS: Sequence[Any] = (*ENDS, abort("no", 503), {"status_code": "?"}, {"message": 1})
COLUMNS = ("output_ids", "finished_reasons", "prompt_tokens", "cached_tokens", "reasoning_tokens")


def _lame(rids: list[str], column: str) -> Any:
    """A batch in which a column is shorter than the others."""
    made = batch(*(Row(rid, [4]) for rid in rids))
    setattr(made, column, getattr(made, column)[:-1])
    return made


AT = st.integers(0, REQUESTS)
"""A request; the last is none."""
WORDS = st.one_of(
    st.tuples(st.just("rows"), st.lists(st.tuples(AT, st.sampled_from(ENDS)), max_size=4)),
    st.tuples(st.just("aside"), AT, st.sampled_from(REASONS)),
    st.tuples(st.just("lame"), AT, st.sampled_from(COLUMNS)),
    st.tuples(st.just("embedding"), AT),
    st.tuples(st.just("stranger")),
)


def said(word: Any, rids: Sequence[str]) -> Any:
    kind, *rest = word
    if kind == "rows":
        return batch(*(Row(rids[at], [3], end) for at, end in rest[0]))
    if kind == "aside":
        return io.AbortReq(rid=rids[rest[0]], finished_reason=rest[1])
    if kind == "lame":
        return _lame([rids[rest[0]]], rest[1])
    if kind == "embedding":
        return embeddings((rids[rest[0]], [0.5]))
    return io.ActiveRanksOutput(status=[True])


@given(st.lists(WORDS, max_size=8), st.booleans())
@settings(max_examples=60)
async def test_every_request_ends_once_whatever_the_scheduler_says(
    words: list[Any], stream: bool
) -> None:
    """Unknown ids, ends that come twice, outputs after the end, rows and reasons that make no
    sense: each request ends with its complete or one status, and nothing is left of it.
    """
    async with served_sglang() as server:
        reading = [
            asyncio.ensure_future(server.generate(request(f"r-{at}", stream=stream)))
            for at in range(REQUESTS)
        ]
        rids = [message.rid for message in await server.sent(REQUESTS)] + ["stranger"]
        for word in words:
            await server.scheduler.say(said(word, rids))
        await server.scheduler.say(batch(*(Row(rid, [9], stop()) for rid in rids)))
        for history in await asyncio.wait_for(asyncio.gather(*reading), 5):
            assert history.code in (CODE.OK, CODE.INVALID_ARGUMENT, CODE.INTERNAL, CODE.UNAVAILABLE)
            assert check(history) == []
            assert history.code is CODE.OK or history.details
        await server.idle()
        assert server.dead == []


@pytest.mark.parametrize("encoding", ["pickle", "msgpack"])
@pytest.mark.parametrize("what", ["garbage", "no ids", "another layout"])
async def test_a_message_of_nobody_knows_whom_ends_all_in_words(
    what: str, encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Streams and control calls end UNAVAILABLE at once, also when more messages follow."""
    monkeypatch.setattr(io, "_USE_PICKLE_IPC", encoding == "pickle")
    async with served_sglang() as server:
        reading = asyncio.ensure_future(server.generate(request()))
        flushing = server.stub.FlushCache(common_pb2.FlushCacheRequest())
        (sent, _) = await server.sent(2)
        await _say(server, what)
        await server.scheduler.say(batch(Row(sent.rid, [9], stop())))
        history: History = await asyncio.wait_for(reading, 5)
        assert history.code is CODE.UNAVAILABLE
        assert history.details
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await flushing
        assert caught.value.code() is CODE.UNAVAILABLE
        assert len(server.dead) == 1
        await server.idle()


async def _say(server: ServedSglang, what: str) -> None:
    if what == "no ids":
        lost = batch(Row("x", [1]))
        lost.rids = SimpleNamespace() if io._USE_PICKLE_IPC else []
        if not io._USE_PICKLE_IPC:
            lost.rids = ["x", 7]
        await server.scheduler.say(lost)
    else:
        data = b"\x93\x01\x02\x03" if what == "another layout" else b"\xc1 no message"
        server.scheduler.detokenizer.send(data)


async def test_a_stranger_that_comes_with_every_step_is_told_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Another release's message must not fill the log."""
    async with served_sglang() as server:
        for _ in range(50):
            await server.scheduler.say_aside(io.ActiveRanksOutput(status=[True]))
        before = server.manager.last_receive
        await server.scheduler.say_aside(io.HealthCheckOutput())
        await until(lambda: server.manager.last_receive != before)
        told = [record for record in caplog.records if "ActiveRanksOutput" in record.getMessage()]
        assert len(told) == 1


async def test_a_bare_abort_of_the_pass_over_the_prompt_ends_every_choice_as_aborted() -> None:
    async with served_sglang() as server:
        sending = request(params={"n": 2}, prompt=[5] * 1024)
        reading = asyncio.ensure_future(server.generate(sending))
        (sent,) = await server.sent()
        await server.scheduler.say(batch(Row(sent.rid, [], abort())))
        history = await reading
        assert check(history, choices=2) == []
        assert [done.finish_reason for done in history.completes] == ["abort", "abort"]
        await server.idle()
