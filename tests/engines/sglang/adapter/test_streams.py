"""What the scheduler produces reaches its stream, whichever socket it comes on."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.testing.history import History, check
from tests.support.sglang_served import ServedSglang, request, served_sglang
from tests.support.sglang_stub import Row, abort, batch, stop

CODE = grpc.StatusCode
EITHER_WAY = pytest.mark.parametrize("stream", [True, False])


async def started(server: ServedSglang, **fields: Any) -> tuple[Any, asyncio.Task[History]]:
    """The scheduler's message of a call, and the call's history to come."""
    before = len(server.scheduler.received)
    reading = asyncio.ensure_future(server.generate(request(**fields)))
    return (await server.sent(before + 1))[before], reading


@pytest.mark.parametrize("skip_tokenizer_init", [False, True])
@EITHER_WAY
async def test_tokens_and_counts(stream: bool, skip_tokenizer_init: bool) -> None:
    async with served_sglang(skip_tokenizer_init=skip_tokenizer_init) as server:
        sent, reading = await started(server, stream=stream)
        await server.scheduler.say(batch(Row(sent.rid, [11], completion_tokens=1)))
        end = Row(sent.rid, [12, 13], stop(13), 3, 3, 2, 1)
        await server.scheduler.say(batch(end))
        history = await reading

        assert check(history) == []
        done = history.complete()
        assert list(done.output_ids) == [11, 12, 13]
        assert (done.prompt_tokens, done.completion_tokens, done.cached_tokens) == (3, 3, 2)
        assert (done.reasoning_tokens, done.finish_reason) == (1, "stop")
        await server.idle()
        assert server.scheduler.aborts == []


async def test_one_batch_serves_many_and_strangers_are_ignored() -> None:
    async with served_sglang() as server:
        (one, first), (two, second) = [
            await started(server, request_id=name) for name in ("a", "b")
        ]
        await server.scheduler.say(
            batch(
                Row("stranger", [1]),
                Row(two.rid, [22], stop()),
                Row(one.rid, [11], stop()),
            )
        )
        assert list((await first).complete().output_ids) == [11]
        assert list((await second).complete().output_ids) == [22]


@pytest.mark.parametrize(
    ("matched", "asked", "told"),
    [
        (7, {"stop_token_ids": [7]}, 7),
        (2, {"stop_token_ids": [7]}, None),
        ("END", {"stop": ["END"]}, "END"),
        ([7, 8], {"stop_token_ids": [7, 8]}, None),
        (None, {}, None),
    ],
)
async def test_only_the_request_s_own_stop_is_told(matched: Any, asked: Any, told: Any) -> None:
    async with served_sglang() as server:
        sent, reading = await started(server, params=asked)
        await server.scheduler.say(batch(Row(sent.rid, [7], stop(matched))))
        done = (await reading).complete()
        which = done.WhichOneof("matched_stop")
        assert (getattr(done, which) if which else None) == told


async def test_row_1_a_refusal_of_a_queued_request_reaches_its_client() -> None:
    """§11-1: it comes on the tokenizer's socket, beside the control replies."""
    from sglang.srt.managers.io_struct import AbortReq

    async with served_sglang() as server:
        sent, reading = await started(server)
        reason = abort("The request queue is full.", 503)
        await server.scheduler.say_aside(AbortReq(rid=sent.rid, finished_reason=reason))
        history = await asyncio.wait_for(reading, 2)
        assert (history.code, history.details) == (CODE.UNAVAILABLE, "The request queue is full.")
        await server.idle()


@pytest.mark.parametrize(
    ("status", "code"),
    [
        (400, CODE.INVALID_ARGUMENT),
        (404, CODE.NOT_FOUND),
        (408, CODE.DEADLINE_EXCEEDED),
        (429, CODE.RESOURCE_EXHAUSTED),
        (500, CODE.INTERNAL),
        (503, CODE.UNAVAILABLE),
        (504, CODE.DEADLINE_EXCEEDED),
    ],
)
async def test_an_abort_s_status_is_the_call_s(status: int, code: grpc.StatusCode) -> None:
    async with served_sglang() as server:
        sent, reading = await started(server)
        row = Row(sent.rid, [9], abort("Input length is too much", status), prompt_tokens=1)
        await server.scheduler.say(batch(row))
        history = await reading
        assert history.code is code
        assert "Input length is too much" in history.details
        assert history.messages == [], "the row's token means nothing"


async def test_a_bare_abort_ends_with_a_complete() -> None:
    async with served_sglang() as server:
        sent, reading = await started(server)
        await server.scheduler.say(batch(Row(sent.rid, [9], abort(), completion_tokens=1)))
        done = (await reading).complete()
        assert (done.finish_reason, list(done.output_ids)) == ("abort", [9])


async def test_a_constraint_that_failed_in_the_engine_has_its_trailer() -> None:
    async with served_sglang() as server:
        call = server.stub.Generate(request(params={"regex": "a+"}))
        (sent,) = await server.sent()
        reason = abort("Grammar accept_token failed: no", 500, "InternalServerError")
        await server.scheduler.say(batch(Row(sent.rid, [9], reason)))
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            async for _ in call:
                pass
        assert caught.value.code() is CODE.FAILED_PRECONDITION
        assert dict(caught.value.trailing_metadata())["smg-constraint-failed"] == "engine"
        assert "under its constraint" in (caught.value.details() or "")


async def test_row_2_an_abort_ends_the_stream_and_reaches_the_scheduler_once() -> None:
    """§11-2: with a complete, at once, and nothing stays behind."""
    async with served_sglang() as server:
        sent, reading = await started(server)
        await server.scheduler.say(batch(Row(sent.rid, [9], completion_tokens=1)))
        answer = await server.stub.Abort(pb.AbortRequest(request_id="r"))
        assert answer.success
        history = await asyncio.wait_for(reading, 2)
        assert (history.code, history.complete().finish_reason) == (CODE.OK, "abort")
        await server.idle()
        assert server.scheduler.aborts == [sent.rid]


async def test_rows_3_and_4_an_id_in_flight_is_refused_and_may_be_used_again() -> None:
    """§11-3 and 4: neither an old request's end nor a duplicate touches another stream."""
    async with served_sglang() as server:
        sent, reading = await started(server)
        twice = await server.generate(request())
        assert twice.code is CODE.ALREADY_EXISTS
        await server.scheduler.say(batch(Row(sent.rid, [9], stop())))
        assert (await reading).code is CODE.OK

        again, second = await started(server)
        assert again.rid != sent.rid
        await server.scheduler.say(batch(Row(sent.rid, [1], stop())))
        await server.scheduler.say(batch(Row(again.rid, [8], stop())))
        assert list((await second).complete().output_ids) == [8]


@EITHER_WAY
async def test_rows_5_and_6_choices_start_at_once_and_have_their_index(stream: bool) -> None:
    async with served_sglang() as server:
        reading = asyncio.ensure_future(
            server.generate(request(params={"n": 3}, stream=stream, return_logprob=True))
        )
        sent = await server.sent(3)
        assert all(message.sampling_params.n == 1 for message in sent)
        for at in (2, 0, 1):
            probs = {"output_token_logprobs_val": [-0.5], "output_token_logprobs_idx": [at]}
            row = Row(sent[at].rid, [40 + at], stop(), completion_tokens=1, logprobs=probs)
            await server.scheduler.say(batch(row))
        history = await reading
        assert {c.index: list(c.output_ids) for c in history.completes} == {
            0: [40],
            1: [41],
            2: [42],
        }
        await server.idle()


LONG_PROMPT = [5] * 1024


async def test_row_7_a_refused_pass_over_the_prompt_ends_the_request() -> None:
    async with served_sglang() as server:
        sent, reading = await started(server, params={"n": 2}, prompt=LONG_PROMPT)
        assert sent.sampling_params.max_new_tokens == 0
        assert not sent.return_logprob
        await server.scheduler.say(batch(Row(sent.rid, [], abort("no", 400))))
        history = await reading
        assert history.code is CODE.INVALID_ARGUMENT
        await server.idle()
        assert len(server.scheduler.received) == 1
        assert server.scheduler.aborts == []


async def test_the_pass_over_the_prompt_comes_first_where_it_pays() -> None:
    async with served_sglang() as server:
        sent, reading = await started(server, params={"n": 2}, prompt=LONG_PROMPT)
        await asyncio.sleep(0)
        assert len(server.scheduler.received) == 1
        finish = {"type": "length", "length": 0}
        await server.scheduler.say(batch(Row(sent.rid, [], finish, 1024)))
        choices = (await server.sent(3))[1:]
        assert [c.sampling_params.max_new_tokens for c in choices] == [4, 4]
        for at, choice in enumerate(choices):
            await server.scheduler.say(batch(Row(choice.rid, [at], stop(), 1024, 1)))
        assert [list(c.output_ids) for c in (await reading).completes] == [[0], [1]]


@pytest.mark.parametrize(
    "fields",
    [{"prompt": [5] * 100}, {"prompt": LONG_PROMPT, "return_logprob": True}],
    ids=["short", "prompt logprobs"],
)
async def test_no_pass_over_a_prompt_that_would_not_pay(fields: Any) -> None:
    async with served_sglang() as server:
        call = server.stub.Generate(request(params={"n": 2}, **fields))
        sent = await server.sent(2)
        assert [message.sampling_params.max_new_tokens for message in sent] == [4, 4]
        call.cancel()


async def test_one_failed_choice_ends_the_request_and_stops_the_others() -> None:
    async with served_sglang() as server:
        reading = asyncio.ensure_future(server.generate(request(params={"n": 3})))
        sent = await server.sent(3)
        await server.scheduler.say(batch(Row(sent[1].rid, [], abort("full", 503))))
        assert (await reading).code is CODE.UNAVAILABLE
        await server.idle()
        await server.aborted(sent[0].rid, sent[2].rid)


async def test_row_18_speculative_counts() -> None:
    from smg_grpc_servicer.sglang.limits import Limits

    async with served_sglang(limits=Limits(drafts_per_step=3)) as server:
        sent, reading = await started(server)
        await server.scheduler.say(batch(Row(sent.rid, [9], stop(), spec=(4, 5))))
        done = (await reading).complete()
        assert (done.spec_accepted_tokens, done.spec_draft_tokens) == (5, 12)


async def test_hidden_states_stand_in_the_complete_with_their_positions() -> None:
    from smg_grpc_servicer.sglang.limits import Limits

    async with served_sglang(limits=Limits(hidden_states="full")) as server:
        sent, reading = await started(server, return_hidden_states=True)
        assert sent.return_hidden_states is True
        hidden = [[[0.5, 1.0], [1.5, 2.0]], [2.5, 3.0]]
        row = Row(sent.rid, [9, 8], stop(), 3, 2, cached_tokens=1, hidden=hidden)
        await server.scheduler.say(batch(row))
        rows = (await reading).complete().all_hidden_states
        assert [(row.position, list(row.values)) for row in rows] == [
            (1, [0.5, 1.0]),
            (2, [1.5, 2.0]),
            (3, [2.5, 3.0]),
        ]
