"""Requests at the real scheduler: aborts, ids, choices, adapters, hidden states, bad input.

Rows are those of the faults that SGLang's users met with the published servicer.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import History, check
from tests.support.client import Client
from tests.support.servers import Server
from tests.support.sglang_cases import VOCAB, prompt
from tests.support.tiny_sglang import CONTEXT

GOOD = prompt(5, 20)
LONG = {"max_tokens": 900}


async def idle(client: Client, seconds: float = 10.0) -> None:
    """Neither the server nor the scheduler has anything to do."""
    await client.until_active(0)
    end = monotonic() + seconds
    while (await client.stub.GetLoads(client.pb.GetLoadsRequest())).aggregate.total_reqs:
        assert monotonic() < end


async def test_row_2_an_abort_ends_the_stream_at_once(client: Client) -> None:
    call, history = await client.begin(prompt(8, 21), request_id="row-2", **LONG)
    start = monotonic()
    answer = await client.stub.Abort(client.pb.AbortRequest(request_id="row-2"))
    assert answer.success
    await history.record(call)
    assert monotonic() - start < 1
    assert history.code is grpc.StatusCode.OK
    assert history.complete().finish_reason == "abort"
    await idle(client)


async def test_an_abort_touches_no_id_that_begins_alike(client: Client) -> None:
    other, history = await client.begin(prompt(8, 22), request_id="same-10", max_tokens=60)
    call, _ = await client.begin(prompt(8, 23), request_id="same-1", **LONG)
    await client.stub.Abort(client.pb.AbortRequest(request_id="same-1"))
    await history.record(other)
    assert history.complete().finish_reason == "length"
    call.cancel()
    await idle(client)


async def test_row_3_an_id_may_be_used_again_at_once(client: Client) -> None:
    for _ in range(5):
        history = await client.generate(GOOD, request_id="row-3", max_tokens=3)
        assert check(history) == []
    await idle(client)


async def test_row_4_a_second_request_under_an_id_is_refused(client: Client) -> None:
    call, history = await client.begin(prompt(8, 24), request_id="row-4", max_tokens=200)
    second = await client.generate(GOOD, request_id="row-4", max_tokens=3)
    assert second.code is grpc.StatusCode.ALREADY_EXISTS
    await history.record(call)
    assert check(history) == []
    await idle(client)


@pytest.mark.parametrize("stream", [True, False])
async def test_rows_5_and_6_all_choices_run_at_once_with_their_index(
    client: Client, stream: bool
) -> None:
    task = asyncio.ensure_future(
        client.generate(prompt(8, 25), stream=stream, n=3, temperature=1.0, max_tokens=300)
    )
    most = 0
    while not task.done():
        (row,) = (await client.stub.GetLoads(client.pb.GetLoadsRequest())).loads
        most = max(most, row.num_running_reqs)
    history = task.result()
    assert most == 3
    assert check(history, choices=3) == []
    assert sorted(complete.index for complete in history.completes) == [0, 1, 2]
    outputs = {tuple(complete.output_ids) for complete in history.completes}
    assert len(outputs) == 3
    await idle(client)


async def test_row_8_a_client_that_leaves_frees_the_scheduler(client: Client) -> None:
    calls = [await client.begin(prompt(8, 30 + at), **LONG) for at in range(6)]
    for call, _ in calls:
        call.cancel()
    await idle(client, 3)


async def test_a_hundred_requests_of_which_ten_leave(client: Client) -> None:
    """At points that differ; both sides' tables return to zero."""

    async def one(at: int) -> History | None:
        request = client.request(prompt(3 + at % 20, 40), max_tokens=10 + at % 30)
        call = client.stub.Generate(request)
        if at % 10:
            return await History(stream=True).record(call)
        for _ in range(at // 10):
            await call.read()
        call.cancel()
        return None

    histories = await asyncio.gather(*map(one, range(100)))
    assert [check(history) for history in histories if history] == [[]] * 90
    await idle(client)


async def test_row_14_an_adapter_is_loaded_used_listed_and_unloaded(
    client: Client, models: dict[str, Path]
) -> None:
    pb = client.pb
    load = pb.LoadLoRAAdapterRequest(
        lora_id="id-1", lora_name="noise", lora_path=str(models["adapter"])
    )
    plain = await client.ids(GOOD, max_tokens=12)
    answer = await client.stub.LoadLoRAAdapter(load)
    assert answer.success, answer.message
    listed = await client.stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest())
    assert [(each.lora_id, each.lora_name) for each in listed.loaded_adapters] == [
        ("id-1", "noise")
    ]
    request = client.request(GOOD, max_tokens=12)
    request.lora_id = "id-1"
    adapted = await client.send(request)
    assert check(adapted) == []
    assert list(adapted.complete().output_ids) != plain
    with pytest.raises(grpc.aio.AioRpcError) as twice:
        await client.stub.LoadLoRAAdapter(load)
    assert twice.value.code() in (
        grpc.StatusCode.INVALID_ARGUMENT,
        grpc.StatusCode.ALREADY_EXISTS,
    )
    gone = await client.stub.UnloadLoRAAdapter(
        pb.UnloadLoRAAdapterRequest(lora_id="id-1", lora_name="noise")
    )
    assert gone.success
    request.request_id += "-again"
    assert (await client.send(request)).code is grpc.StatusCode.INVALID_ARGUMENT
    assert await client.ids(GOOD, max_tokens=12) == plain


async def test_an_adapter_makes_way_and_comes_back(client: Client, models: dict[str, Path]) -> None:
    """--max-loaded-loras is 2: the third takes the place of the one used longest ago."""
    pb = client.pb

    async def adapted(adapter_id: str) -> list[int]:
        request = client.request(GOOD, max_tokens=12)
        request.lora_id = adapter_id
        history = await client.send(request)
        assert check(history) == []
        return list(history.complete().output_ids)

    names = ("one", "two", "three")
    loaded = []
    for name in names:
        load = pb.LoadLoRAAdapterRequest(
            lora_id=name, lora_name=name, lora_path=str(models["adapter"])
        )
        answer = await client.stub.LoadLoRAAdapter(load)
        assert answer.success, answer.message
        loaded.append(list(answer.loaded_lora_ids))
    assert loaded == [["one"], ["one", "two"], ["two", "three"]]
    same = [await adapted(name) for name in ("two", "one", "three")]
    assert same == same[:1] * 3
    for name in names:
        gone = await client.stub.UnloadLoRAAdapter(pb.UnloadLoRAAdapterRequest(lora_name=name))
        assert gone.success
        assert name not in gone.loaded_lora_ids


async def test_hidden_states_come_with_the_end(client: Client) -> None:
    request = client.request(GOOD, max_tokens=3, stream=False)
    request.return_hidden_states = True
    history = await client.send(request)
    assert check(history) == []
    assert history.complete().all_hidden_states


BAD: dict[str, tuple[str, dict[str, Any]]] = {
    "empty prompt": ("tokenized.input_ids", {"prompt": []}),
    "token at the vocabulary": ("tokenized.input_ids[1]", {"prompt": [1, VOCAB]}),
    "prompt past the context": ("tokenized.input_ids", {"prompt": [3] * 2 * CONTEXT}),
    "temperature -1": ("temperature", {"temperature": -1.0}),
    "temperature nan": ("temperature", {"temperature": math.nan}),
    "top_p 1.5": ("top_p", {"top_p": 1.5}),
    "min_p 2": ("min_p", {"min_p": 2.0}),
    "frequency_penalty 5": ("frequency_penalty", {"frequency_penalty": 5.0}),
    "min_tokens past max_tokens": ("min_new_tokens", {"min_tokens": 30, "max_tokens": 2}),
    "logit_bias out of the vocabulary": ("logit_bias", {"logit_bias": {100_000: 1.0}}),
    "logit_bias -1": ("logit_bias", {"logit_bias": {-1: 1.0}}),
    "json_schema no JSON": ("json_schema", {"json_schema": "{"}),
    "regex": ("regex", {"regex": "(("}),
    "rank 1 of one": ("data_parallel_rank", {"data_parallel_rank": 1}),
    "chosen id out of the vocabulary": ("token_ids_logprob", {"token_ids_logprob": [VOCAB]}),
    "unknown adapter": ("lora_id", {"lora_id": "nobody"}),
}
ASIDE = ("data_parallel_rank", "lora_id", "token_ids_logprob")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("name", BAD)
async def test_rows_19_and_20_bad_input_costs_its_sender_alone(
    client: Client, server: Server, name: str, stream: bool
) -> None:
    """Much of it ended the scheduler once: who sends it is told which field, nobody else is."""
    field, options = BAD[name]
    options = {"prompt": GOOD, "max_tokens": 4, **options}
    aside = {key: options.pop(key) for key in ASIDE if key in options}
    request = client.request(options.pop("prompt"), stream=stream, **options)
    for key, value in aside.items():
        if isinstance(value, list):
            getattr(request, key).extend(value)
            request.return_logprob = True
        else:
            setattr(request, key, value)
    history = await client.send(request)
    assert history.code is grpc.StatusCode.INVALID_ARGUMENT, history.details
    if name not in ("json_schema no JSON", "regex"):  # judged by the scheduler, in its words
        assert field in history.details
    assert len(await client.ids(GOOD, max_tokens=2)) == 2
    assert server.running
