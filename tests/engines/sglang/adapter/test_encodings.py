"""§11-28: both of SGLang's encodings between the processes, through its own send and receive."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from sglang.srt.managers import io_struct as io
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.types import ModelFacts
from smg_grpc_servicer.sglang.limits import Limits
from tests.support.sglang_served import pixels, request, served_sglang
from tests.support.sglang_stub import Row, abort, batch, embeddings, stop

EMBEDDING = ModelFacts("/m", "m", is_generation=False, max_context_length=64, vocab_size=1000)


@pytest.fixture(params=["pickle", "msgpack"], autouse=True)
def encoding(request: Any, monkeypatch: pytest.MonkeyPatch) -> str:
    """SGLang reads its switch once, at import."""
    pickled = request.param == "pickle"
    monkeypatch.setattr(io, "_USE_PICKLE_IPC", pickled)
    monkeypatch.setenv("SGLANG_USE_PICKLE_IPC", str(int(pickled)))
    return str(request.param)


async def test_a_request_and_its_output() -> None:
    async with served_sglang(limits=Limits(media=True)) as server:
        params = {
            "custom_params": {"ids": [1, 2], "on": True},
            "stop_token_ids": [12],
            "logit_bias": {"7": 1.0},
            "stop": ["END"],
        }
        asked = request(
            params=params, return_logprob=True, top_logprobs_num=1, mm_inputs=pixels(), stream=False
        )
        reading = asyncio.ensure_future(server.generate(asked))
        (sent,) = await server.sent()
        assert list(sent.input_ids) == [5, 6, 7]
        assert sent.sampling_params.custom_params == {"ids": [1, 2], "on": True}
        assert sent.sampling_params.stop_token_ids == {12}
        assert sent.sampling_params.stop_strs == ["END"]
        assert sent.mm_inputs.mm_items[0].feature.shape == (2, 2)
        columns = {
            "output_token_logprobs_val": [-0.5, -1.5],
            "output_token_logprobs_idx": [11, 12],
            "output_top_logprobs_val": [[-0.5], [-1.5]],
            "output_top_logprobs_idx": [[11], [12]],
            "input_token_logprobs_val": [None, -1.0, -2.0],
            "input_token_logprobs_idx": [5, 6, 7],
            "input_top_logprobs_val": [None, [-1.0], [-2.0]],
            "input_top_logprobs_idx": [None, [6], [7]],
        }
        row = Row(sent.rid, [11, 12], stop(12), 3, 2, logprobs=columns)
        await server.scheduler.say(batch(row))
        done = (await reading).complete()
        assert list(done.output_ids) == [11, 12]
        assert done.matched_token_id == 12
        assert list(done.output_logprobs.token_logprobs) == [-0.5, -1.5]
        assert len(done.input_logprobs.token_logprobs) == 3
        await server.idle()


async def test_aborts_and_control_calls() -> None:
    async with served_sglang() as server:
        call = server.stub.Generate(request())
        (sent,) = await server.sent()
        call.cancel()
        await server.aborted(sent.rid)

        reading = asyncio.ensure_future(server.generate(request("queued")))
        queued = (await server.sent(2))[1]
        reason = abort("The request queue is full.", 503)
        await server.scheduler.say_aside(io.AbortReq(rid=queued.rid, finished_reason=reason))
        assert "queue is full" in (await reading).details

        server.scheduler.answers = {
            io.FlushCacheReqInput: lambda r: io.FlushCacheReqOutput(success=True)
        }
        assert (await server.stub.FlushCache(common_pb2.FlushCacheRequest())).success
        await server.idle()


async def test_an_embedding() -> None:
    async with served_sglang(facts=EMBEDDING) as server:
        call = server.stub.Embed(pb.EmbedRequest(request_id="e", tokenized={"input_ids": [5]}))
        (sent,) = await server.sent()
        await server.scheduler.say(embeddings((sent.rid, [0.5, 0.25])))
        assert list((await call).embedding) == [0.5, 0.25]


async def test_parameters_the_scheduler_could_not_decode_are_refused(encoding: str) -> None:
    """Its typed decoder ends the scheduler over a value nested too deeply; pickle has no types."""
    async with served_sglang() as server:
        custom = {"deep": {"list": [1]}}
        call = server.stub.Generate(request(params={"custom_params": custom}))
        if encoding == "pickle":
            (sent,) = await server.sent()
            assert sent.sampling_params.custom_params == custom
            call.cancel()
            return
        with pytest.raises(Exception, match="must not be nested so deeply"):
            await anext(aiter(call))
