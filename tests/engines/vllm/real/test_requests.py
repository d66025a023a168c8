"""What a request gets from the real engine: counts, ends, defaults, and how it is ended early."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import check
from tests.support.client import Client
from tests.support.real_vllm import CONTEXT
from tests.support.vllm_cases import prompt

END, PAD = "<|im_end|>", "<|endoftext|>"


async def free(client: Client, seconds: float = 1.0) -> None:
    """Neither we nor the engine have a request left.

    vLLM's figures are those of its last step, so a request of ours makes it take one more.
    """
    start = monotonic()
    while True:
        await client.ids(prompt(3, 30), max_tokens=1)
        loads = await client.stub.GetLoads(client.pb.GetLoadsRequest())
        if loads.loads[0].num_running_reqs <= 1 and not await client.active():
            return
        assert monotonic() - start < seconds, loads


@pytest.mark.parametrize("stream", [True, False])
async def test_counts_of_a_choice_are_its_own(client: Client, stream: bool) -> None:
    """n=3: every choice has its chunks, its complete and its own count; the prompt counts once."""
    options = {"temperature": 1.0, "n": 3, "max_tokens": 40, "ignore_eos": False, "seed": 1}
    history = await client.generate(prompt(17, 31), stream=stream, **options)
    assert check(history, 3) == []
    outputs = [list(history.complete(index).output_ids) for index in range(3)]
    assert len({tuple(ids) for ids in outputs}) == 3
    assert [c.prompt_tokens for c in history.completes] == [17] * 3


async def test_a_repeated_prefix_is_reported_as_cached(client: Client) -> None:
    """vLLM's CPU blocks have 128 tokens: a prompt of 300 leaves two of them."""
    ids = prompt(300, 32)
    first = (await client.generate(ids, max_tokens=4)).complete()
    assert first.cached_tokens == 0
    history = await client.generate([*ids, 5, 6], max_tokens=4)
    assert history.complete().cached_tokens == 256
    assert history.chunks[0].cached_tokens == 256
    assert history.complete().prompt_tokens == 302


async def test_the_models_own_end_is_no_stop_the_caller_asked_for(
    client: Client, words: Any
) -> None:
    """Both of its end ids end the output, neither is named; a stop id of the caller is."""
    for name in (END, PAD):
        token = words.token_to_id(name)
        options = {"max_tokens": 5, "logit_bias": {token: 100.0}}
        ended = (await client.generate(prompt(6, 33), ignore_eos=False, **options)).complete()
        assert (list(ended.output_ids), ended.finish_reason) == ([token], "stop")
        assert ended.WhichOneof("matched_stop") is None
        held = (await client.generate(prompt(6, 33), **options)).complete()
        assert (list(held.output_ids), held.finish_reason) == ([token] * 5, "length")
        asked = (await client.generate(prompt(6, 33), stop_token_ids=[token], **options)).complete()
        assert asked.matched_token_id == token


async def test_a_stop_id_ends_and_is_named(client: Client) -> None:
    ids = await client.ids(prompt(7, 34), max_tokens=12)
    stop = ids[4]
    history = await client.generate(prompt(7, 34), max_tokens=12, stop_token_ids=[stop, 9])
    complete = history.complete()
    assert list(complete.output_ids) == ids[: ids.index(stop) + 1]
    assert (complete.finish_reason, complete.matched_token_id) == ("stop", stop)


async def test_text_is_tokenized_as_vllm_does(client: Client, words: Any) -> None:
    """Special tokens written out in a text are read as such."""
    text = f"<|im_start|>user\nhello world{END}\n"
    ids = words.encode(text).ids
    history = await client.generate([], text=text, max_tokens=8)
    assert check(history) == []
    assert history.complete().prompt_tokens == len(ids)
    assert list(history.complete().output_ids) == await client.ids(ids, max_tokens=8)


async def test_truncation_keeps_the_end_of_a_prompt(client: Client) -> None:
    """It used to be ignored for token ids; -1 keeps what leaves room for an answer."""
    ids = prompt(40, 35)
    kept = await client.generate(ids, max_tokens=8, truncate_prompt_tokens=7)
    assert kept.complete().prompt_tokens == 7
    assert list(kept.complete().output_ids) == await client.ids(ids[-7:], max_tokens=8)
    long = await client.generate(prompt(3000, 35), max_tokens=8, truncate_prompt_tokens=-1)
    assert check(long) == []
    assert 0 < long.complete().prompt_tokens < CONTEXT


async def test_unset_is_the_models_default_and_zero_is_not(client: Client) -> None:
    """The generation config says 0.7 and 0.95: they hold where nothing was sent, and only there."""
    ids = prompt(9, 36)
    options: dict[str, Any] = {"max_tokens": 24, "seed": 11}
    request = client.request(ids, **options)
    for name in ("temperature", "top_p"):
        request.sampling_params.ClearField(name)
    unset = list((await client.send(request)).complete().output_ids)
    assert unset == await client.ids(ids, **options, temperature=0.7, top_p=0.95)
    assert unset != await client.ids(ids, **options, temperature=1.0, top_p=1.0)
    assert await client.ids(ids, **options, temperature=0.0) == await client.ids(ids, max_tokens=24)


async def test_a_request_without_sampling_params_is_served(client: Client) -> None:
    request = client.pb.GenerateRequest(request_id="bare", stream=True)
    request.tokenized.input_ids.extend(prompt(CONTEXT - 40, 37))
    history = await client.send(request)
    assert check(history) == []
    assert history.complete().finish_reason in ("stop", "length")


@pytest.mark.parametrize("stream", [True, False])
async def test_abort_ends_with_a_complete(client: Client, stream: bool) -> None:
    running = asyncio.ensure_future(
        client.generate(
            prompt(8, 38), request_id="to-abort", stream=stream, max_tokens=1000, n=2,
            temperature=1.0,
        )
    )  # fmt: skip
    await client.until_active(1)
    await client.stub.Abort(client.pb.AbortRequest(request_ids=["to-abort", "nobody"]))
    history = await asyncio.wait_for(running, 2)
    assert check(history, 2) == []
    assert [c.finish_reason for c in history.completes] == ["abort"] * 2
    await free(client)


@pytest.mark.parametrize("stream", [True, False])
async def test_a_cancel_frees_the_engine(client: Client, stream: bool) -> None:
    request = client.request(prompt(8, 39), stream=stream, max_tokens=1000)
    call = client.stub.Generate(request)
    await call.read() if stream else await client.until_active(1)
    call.cancel()
    await free(client)


async def test_a_deadline_frees_the_engine(client: Client) -> None:
    request = client.request(prompt(8, 40), max_tokens=1000)
    with pytest.raises(grpc.aio.AioRpcError) as ended:
        async for _ in client.stub.Generate(request, timeout=0.3):
            pass
    assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await free(client)


async def test_a_duplicate_id_is_refused_and_the_first_unharmed(client: Client) -> None:
    """vLLM itself takes both, and an abort of one then ends the other too."""
    call, history = await client.begin(prompt(8, 41), request_id="twice", max_tokens=400)
    second = await client.generate(prompt(8, 41), request_id="twice", max_tokens=4)
    assert second.code is grpc.StatusCode.ALREADY_EXISTS
    assert check(await history.record(call)) == []
    assert len(history.streamed_ids()) == 400
    assert check(await client.generate(prompt(8, 41), request_id="twice", max_tokens=4)) == []


async def test_more_streams_than_the_engine_runs_at_once(client: Client) -> None:
    """Those that wait in its queue get the same answer as alone."""
    prompts = [prompt(4 + at, 42) for at in range(80)]
    histories = await client.together([client.request(p, max_tokens=12) for p in prompts])
    assert [check(h) for h in histories] == [[]] * 80
    for at in (0, 40, 79):
        assert histories[at].streamed_ids() == await client.ids(prompts[at], max_tokens=12)
    await free(client)


async def test_kv_parameters_without_a_connector_change_nothing(client: Client) -> None:
    """The gateway's prefill leg on an engine without one: the prompt is simply computed."""
    plain = client.request(prompt(8, 43), max_tokens=6)
    asked = client.request(prompt(8, 43), max_tokens=6)
    asked.kv_transfer_params_json = '{"do_remote_decode": true, "big": 12345678901234567890}'
    histories = await client.together([plain, asked])
    assert [check(h) for h in histories] == [[], []]
    assert histories[0].streamed_ids() == histories[1].streamed_ids()
