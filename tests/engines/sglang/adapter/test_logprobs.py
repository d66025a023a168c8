"""Every kind of log-probability, streamed and whole; what does not fit ends one request only."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from tests.support.sglang_served import request, served_sglang
from tests.support.sglang_stub import Row, batch, stop

CODE = grpc.StatusCode
EITHER_WAY = pytest.mark.parametrize("stream", [True, False])
SCORED: dict[str, Any] = {"return_logprob": True, "logprob_start_len": -1}


def rows(ids: list[int], top: int = 0, chosen: list[list[float]] | None = None) -> dict[str, Any]:
    columns: dict[str, Any] = {
        "output_token_logprobs_val": [-0.5] * len(ids),
        "output_token_logprobs_idx": ids,
    }
    if top:
        columns["output_top_logprobs_val"] = [[-0.5] * top for _ in ids]
        columns["output_top_logprobs_idx"] = [list(range(top)) for _ in ids]
    if chosen is not None:
        columns["output_token_ids_logprobs_val"] = chosen
        columns["output_token_ids_logprobs_idx"] = [[7, 8]] * len(chosen)
    return columns


@EITHER_WAY
async def test_output_top_and_prompt_rows(stream: bool) -> None:
    async with served_sglang() as server:
        asked = request(return_logprob=True, top_logprobs_num=2, logprob_start_len=0, stream=stream)
        reading = asyncio.ensure_future(server.generate(asked))
        (sent,) = await server.sent()
        assert (sent.logprob_start_len, sent.top_logprobs_num, sent.return_logprob) == (0, 2, True)
        prompt = {
            "input_token_logprobs_val": [None, -1.0, -2.0],
            "input_token_logprobs_idx": [5, 6, 7],
            "input_top_logprobs_val": [None, [-1.0, -3.0], [-2.0, -4.0]],
            "input_top_logprobs_idx": [None, [6, 1], [7, 1]],
        }
        first = Row(sent.rid, [11], completion_tokens=1, logprobs=rows([11], 2) | prompt)
        await server.scheduler.say(batch(first))
        last = Row(sent.rid, [12, 13], stop(), 3, 3, logprobs=rows([12, 13], 2))
        await server.scheduler.say(batch(last))
        history = await reading

        parts = history.chunks if stream else history.completes
        output = [p.output_logprobs for p in parts]
        assert [token for part in output for token in part.token_ids] == [11, 12, 13]
        tops = [list(top.token_ids) for part in output for top in part.top_logprobs]
        assert tops == [[0, 1]] * 3
        (found,) = [p.input_logprobs for p in parts if p.HasField("input_logprobs")]
        assert [v.HasField("value") for v in found.token_logprobs] == [False, True, True]
        assert [list(top.token_ids) for top in found.top_logprobs] == [[], [6, 1], [7, 1]]
        if stream:
            assert not history.complete().HasField("output_logprobs")


@EITHER_WAY
async def test_chosen_ids_go_out_with_their_tokens_and_all_at_the_end(stream: bool) -> None:
    async with served_sglang() as server:
        asked = request(**SCORED, token_ids_logprob=[7, 8], stream=stream)
        reading = asyncio.ensure_future(server.generate(asked))
        (sent,) = await server.sent()
        assert sent.token_ids_logprob == [7, 8]
        for at, finish in ((1, None), (2, stop())):
            chosen = rows([at], chosen=[[-float(at), -3.0]])
            row = Row(sent.rid, [at], finish, completion_tokens=at, logprobs=chosen)
            await server.scheduler.say(batch(row))
        history = await reading
        end = history.complete().output_logprobs.token_ids_logprobs
        assert [list(row.values) for row in end] == [[-1.0, -3.0], [-2.0, -3.0]]
        assert [list(row.token_ids) for row in end] == [[7, 8]] * 2
        chunks = [len(c.output_logprobs.token_ids_logprobs) for c in history.chunks]
        assert sum(chunks) == (2 if stream else 0)


@EITHER_WAY
@pytest.mark.parametrize("ids", [[], [99]], ids=["as SGLang does", "with the next one's own"])
async def test_a_prompt_that_is_only_scored_has_a_row_and_no_token(
    stream: bool, ids: list[int]
) -> None:
    async with served_sglang() as server:
        params = {"max_new_tokens": 0}
        asked = request(**SCORED, token_ids_logprob=[7, 8], params=params, stream=stream)
        reading = asyncio.ensure_future(server.generate(asked))
        (sent,) = await server.sent()
        scored = rows(ids, chosen=[[-1.0, -2.0]])
        finish = {"type": "length", "length": 0}
        await server.scheduler.say(batch(Row(sent.rid, [], finish, logprobs=scored)))
        done = (await reading).complete()
        (row,) = done.output_logprobs.token_ids_logprobs
        assert list(row.values) == [-1.0, -2.0]
        assert list(done.output_ids) == []
        assert len(done.output_logprobs.token_logprobs) == 0


@pytest.mark.parametrize(
    "broken",
    [
        {"output_token_ids_logprobs_val": []},
        {"output_token_ids_logprobs_val": [[-1.0]]},
        {"output_token_ids_logprobs_val": [None]},
        {"output_token_ids_logprobs_val": [[-1.0, -2.0], [-1.0, -2.0]]},
        {"output_token_ids_logprobs_idx": [[8, 9]]},
        {"output_token_logprobs_val": []},
    ],
)
async def test_rows_that_do_not_fit_end_that_request_only(broken: dict[str, Any]) -> None:
    """§3.4: an engine's fault is INTERNAL and stopped there; its neighbour goes on."""
    async with served_sglang() as server:
        bad = asyncio.ensure_future(
            server.generate(request("bad", **SCORED, token_ids_logprob=[7, 8]))
        )
        (bad_sent,) = await server.sent()
        good = asyncio.ensure_future(
            server.generate(request("good", **SCORED, token_ids_logprob=[7, 8]))
        )
        good_sent = (await server.sent(2))[1]
        fine = rows([9], chosen=[[-1.0, -2.0]])
        await server.scheduler.say(
            batch(
                Row(bad_sent.rid, [9], completion_tokens=1, logprobs=fine | broken),
                Row(good_sent.rid, [9], stop(), completion_tokens=1, logprobs=fine),
            )
        )
        assert (await bad).code is CODE.INTERNAL
        assert (await good).code is CODE.OK
        await server.aborted(bad_sent.rid)
        await server.idle()
