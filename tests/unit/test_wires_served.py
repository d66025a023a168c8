"""Each proto from a client's call to the engine and back, over real gRPC and the fake engine."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.core.types import Feature
from smg_grpc_servicer.testing.dialects import DIALECTS, Dialect, Unsayable
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from smg_grpc_servicer.testing.history import History, check
from tests.support.serving import served

PROMPT = [5, 6, 7]
IDLE = {"in_flight": 0, "pending": 0, "open_choices": 0, "owed": 0}


def that_can_say(*names: str) -> list[Dialect]:
    return [dialect for dialect in DIALECTS.values() if not dialect.lacks.intersection(names)]


def by_name(dialect: Dialect) -> str:
    return dialect.engine


every = pytest.mark.parametrize("dialect", DIALECTS.values(), ids=by_name)
with_choices = pytest.mark.parametrize("dialect", that_can_say("n"), ids=by_name)
either_way = pytest.mark.parametrize("stream", [True, False])


@with_choices
@either_way
async def test_three_choices_with_logprobs_keep_to_themselves(
    dialect: Dialect, stream: bool
) -> None:
    """E6: each choice's rows are in step with its own ids, whatever the others do."""
    engine = FakeEngine(tokens_per_step=2)
    async with served(dialect, engine) as server:
        history = await server.generate(max_tokens=7, n=3, logprobs=2, stream=stream)

        assert check(history, 3, logprobs=2) == []
        for index in range(3):
            complete = history.complete(index)
            assert list(complete.output_ids) == FakeEngine.expected(PROMPT, 7, index)
            assert (complete.prompt_tokens, complete.finish_reason) == (3, "length")
        assert Feature.CHOICES in engine.submitted[0].needs
        assert server.servicer.statistics() == IDLE


@every
@either_way
async def test_a_stop_token_ends_a_choice_and_is_named(dialect: Dialect, stream: bool) -> None:
    stop = FakeEngine.expected(PROMPT, 6)[5]
    async with served(dialect, FakeEngine(tokens_per_step=4)) as server:
        history = await server.generate(
            max_tokens=20, stop_token_ids=[stop], logprobs=1, stream=stream
        )

        assert check(history, logprobs=1) == []
        complete = history.complete()
        assert complete.finish_reason == "stop"
        name = "matched_stop_token_id" if dialect.engine == "mlx" else "matched_token_id"
        assert getattr(complete, name) == stop
        assert complete.output_ids[-1] == stop


@pytest.mark.parametrize("dialect", that_can_say("prompt_logprobs"), ids=by_name)
@either_way
async def test_prompt_logprobs_travel_once(dialect: Dialect, stream: bool) -> None:
    """One row for each prompt token, the first without a value; in one message only."""
    async with served(dialect, FakeEngine(tokens_per_step=2)) as server:
        history = await server.generate(max_tokens=6, logprobs=2, prompt_logprobs=2, stream=stream)

        assert check(history, logprobs=2) == []
        carriers = [
            part
            for part in [*history.chunks, *history.completes]
            if part.HasField("input_logprobs")
        ]
        assert len(carriers) == 1
        rows = carriers[0].input_logprobs
        assert list(rows.token_ids) == PROMPT
        assert [row.HasField("value") for row in rows.token_logprobs] == [False, True, True]
        assert [len(row.values) for row in rows.top_logprobs] == [0, 2, 2]


@either_way
async def test_chosen_ids_have_a_row_for_each_token(stream: bool) -> None:
    dialect = DIALECTS["sglang"]
    async with served(dialect, FakeEngine(tokens_per_step=3)) as server:
        request = dialect.generate("r", PROMPT, max_tokens=7, logprobs=1, stream=stream)
        request.token_ids_logprob.extend([9, 8])
        parts = [
            getattr(message, message.WhichOneof("response"))
            async for message in server.stub.Generate(request)
        ]

        carriers = parts[:-1] if stream else parts
        rows = [row for part in carriers for row in part.output_logprobs.token_ids_logprobs]
        assert [(list(row.token_ids), list(row.values)) for row in rows] == [
            ([9, 8], [-2.25, -2.0])
        ] * 7
        assert all(
            len(part.output_logprobs.token_ids_logprobs) == len(part.output_logprobs.token_ids)
            for part in carriers
        )


@pytest.mark.parametrize("engine", ["sglang", "tokenspeed"])
async def test_each_message_names_its_request(engine: str) -> None:
    async with served(DIALECTS[engine], FakeEngine()) as server:
        history = await server.generate("chatcmpl-1", max_tokens=3)
        assert {message.request_id for message in history.messages} == {"chatcmpl-1"}


@pytest.mark.parametrize("engine", ["mlx", "vllm"])
async def test_a_text_prompt_reaches_the_engine_as_ids(engine: str) -> None:
    fake = FakeEngine()
    async with served(DIALECTS[engine], fake) as server:
        history = await server.generate(text="hi", max_tokens=3)
        assert check(history) == []
        assert fake.submitted[0].prompt == [3 + ord("h"), 3 + ord("i")]


@pytest.mark.parametrize(
    ("keep", "left"), [(2, [6, 7]), (3, [5, 6, 7]), (9, [5, 6, 7]), (-1, [5, 6, 7])]
)
@pytest.mark.parametrize("text", [False, True])
async def test_a_prompt_is_cut_from_the_left(keep: int, left: list[int], text: bool) -> None:
    """Weak point 9: token ids are truncated as a text is."""
    fake = FakeEngine()
    async with served(DIALECTS["vllm"], fake) as server:
        request = DIALECTS["vllm"].generate("r", [5, 6, 7], max_tokens=2)
        if text:
            request.text = "".join(chr(token - 3) for token in (5, 6, 7))
        request.sampling_params.truncate_prompt_tokens = keep
        history = await History(stream=True).record(server.stub.Generate(request))
        assert check(history) == []
        assert fake.submitted[0].prompt == left


@pytest.mark.parametrize(("keep", "words"), [(0, "must not be 0"), (-2, "at least|between")])
async def test_a_truncation_that_leaves_nothing_is_refused(keep: int, words: str) -> None:
    async with served(DIALECTS["vllm"], FakeEngine()) as server:
        request = DIALECTS["vllm"].generate("r", [5, 6, 7])
        request.sampling_params.truncate_prompt_tokens = keep
        history = await History(stream=True).record(server.stub.Generate(request))
        assert history.code is grpc.StatusCode.INVALID_ARGUMENT
        assert re.search(words, history.details)


@pytest.mark.parametrize(
    ("engine", "fields", "words"),
    [
        ("vllm", {"media_refs": {"items": [{"url": "data:,"}]}}, "multimodal input"),
        ("sglang", {"return_hidden_states": True}, "hidden states"),
        ("sglang", {"custom_logit_processor": "x"}, "custom logit processors"),
        ("tokenspeed", {"sampling_params": {"custom_params": {"k": 1}}}, "custom parameters"),
    ],
)
async def test_what_is_not_carried_is_refused_and_never_dropped(
    engine: str, fields: dict[str, Any], words: str
) -> None:
    fake = FakeEngine()
    async with served(DIALECTS[engine], fake) as server:
        pb = DIALECTS[engine].pb
        request = pb.GenerateRequest(request_id="r", tokenized={"input_ids": PROMPT}, **fields)
        history = await History().record(server.stub.Generate(request))

        assert history.messages == []
        assert history.code is grpc.StatusCode.UNIMPLEMENTED
        assert f"does not support {words}" in history.details
        assert fake.submitted == []
        assert server.servicer.statistics() == IDLE


@with_choices
async def test_what_the_engine_lacks_is_refused_in_its_name(dialect: Dialect) -> None:
    async with served(dialect, FakeEngine(features=frozenset())) as server:
        history = await server.generate(n=2)
        assert history.code is grpc.StatusCode.UNIMPLEMENTED
        assert history.details == f"the fake engine does not support {Feature.CHOICES.value}"


@pytest.mark.parametrize("call", ["LoadLoRAAdapter", "UnloadLoRAAdapter", "ListLoadedLoRAAdapters"])
async def test_adapter_calls_are_refused_in_words(call: str) -> None:
    """Not with grpc's "Method not implemented!", which names neither engine nor feature."""
    dialect = DIALECTS["sglang"]
    async with served(dialect, FakeEngine()) as server:
        request = getattr(dialect.pb, f"{call}Request")()
        with pytest.raises(
            grpc.aio.AioRpcError, match="the fake engine does not support"
        ) as caught:
            await getattr(server.stub, call)(request)
        assert caught.value.code() is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
async def test_embed(engine: str) -> None:
    pb = DIALECTS[engine].pb
    async with served(DIALECTS[engine], FakeEngine()) as server:
        answer = await server.stub.Embed(
            pb.EmbedRequest(request_id="e", tokenized={"input_ids": PROMPT})
        )
        assert list(answer.embedding) == [5.0, 6.0, 7.0]
        assert (answer.prompt_tokens, answer.embedding_dim) == (3, 3)

        with pytest.raises(grpc.aio.AioRpcError, match="tokenized") as caught:
            await server.stub.Embed(pb.EmbedRequest(request_id="e"))
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


@every
async def test_facts_of_model_and_server(dialect: Dialect) -> None:
    pb = dialect.pb
    engine = FakeEngine()
    engine.facts = dataclasses.replace(engine.facts, default_sampling={"top_k": 20.0})
    async with served(dialect, engine) as server:
        model = await server.stub.GetModelInfo(pb.GetModelInfoRequest())
        assert (model.served_model_name, model.vocab_size) == ("fake", 1000)
        assert list(model.eos_token_ids) == [2]
        if dialect.engine != "mlx":
            assert model.default_sampling_params_json == '{"top_k":20}'

        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.active_requests == 0
        assert info.uptime_seconds > 0
        health = await server.stub.HealthCheck(pb.HealthCheckRequest())
        assert health.healthy


@pytest.mark.parametrize("engine", ["vllm", "sglang", "tokenspeed"])
async def test_loads(engine: str) -> None:
    """With the sections the gateway asks every engine for."""
    pb = DIALECTS[engine].pb
    async with served(DIALECTS[engine], FakeEngine()) as server:
        answer = await server.stub.GetLoads(
            pb.GetLoadsRequest(include=["core", "disagg", "queues", "memory"])
        )
        assert (answer.version, answer.dp_rank_count, len(answer.loads)) == ("0", 1, 1)
        assert answer.timestamp.endswith("+00:00")


@every
def test_a_dialect_knows_what_it_cannot_say(dialect: Dialect) -> None:
    for name in sorted(dialect.lacks - {"prompt_logprobs"}):
        asked: Any = {name: 1}
        with pytest.raises(Unsayable, match=name):
            dialect.generate("r", PROMPT, **asked)
    if "prompt_logprobs" in dialect.lacks:
        with pytest.raises(Unsayable, match="prompt logprobs"):
            dialect.generate("r", PROMPT, prompt_logprobs=1)
