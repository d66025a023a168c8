"""The contract table of DEVELOPMENT.md, row by row, over real gRPC, through every proto."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.core.errors import Exhausted, InvalidArgument, Unavailable
from smg_grpc_servicer.testing.dialects import DIALECTS, Dialect
from smg_grpc_servicer.testing.fake_engine import CONTEXT, VOCAB, FakeEngine, Faults
from smg_grpc_servicer.testing.history import History, check
from tests.support.serving import Served, served
from tests.support.wait import until

PROMPT = [5, 6, 7]


def that_can_say(*names: str) -> list[Dialect]:
    """The dialects that have fields for all of these."""
    return [d for d in DIALECTS.values() if not d.lacks.intersection(names)]


@pytest.fixture(params=sorted(DIALECTS))
def dialect(request: pytest.FixtureRequest) -> Dialect:
    return DIALECTS[request.param]


async def test_chunks_are_deltas_and_add_up_to_the_complete(dialect: Dialect) -> None:
    """F1: new ids only, cumulative counts, one complete that equals the concatenation."""
    engine = FakeEngine(tokens_per_step=3)
    async with served(dialect, engine) as server:
        history = await server.generate(max_tokens=20)

        assert check(history) == []
        assert history.streamed_ids() == FakeEngine.expected(PROMPT, 20)
        assert history.complete().finish_reason == "length"
        assert history.complete().prompt_tokens == len(PROMPT)
        assert engine.aborts == []
        assert not any(server.servicer.statistics().values())


async def test_a_whole_answer_is_one_message(dialect: Dialect) -> None:
    async with served(dialect, FakeEngine()) as server:
        history = await server.generate(max_tokens=20, stream=False)

        assert check(history) == []
        assert len(history.messages) == 1
        assert list(history.complete().output_ids) == FakeEngine.expected(PROMPT, 20)


@pytest.mark.parametrize("stream", [True, False])
async def test_logprobs_travel_once(dialect: Dialect, stream: bool) -> None:
    """E6: one row for every id, in the chunks of a stream, in the complete of a whole answer."""
    async with served(dialect, FakeEngine(tokens_per_step=2)) as server:
        history = await server.generate(max_tokens=9, stream=stream, logprobs=4)

        assert check(history, logprobs=4) == []


@pytest.mark.parametrize("dialect", that_can_say("n"), ids=lambda d: d.engine)
@pytest.mark.parametrize("stream", [True, False])
async def test_every_choice_has_its_index_and_its_complete(dialect: Dialect, stream: bool) -> None:
    async with served(dialect, FakeEngine(tokens_per_step=2)) as server:
        history = await server.generate(max_tokens=7, n=3, stream=stream)

        assert check(history, 3) == []
        for index in range(3):
            ids = list(history.complete(index).output_ids)
            assert ids == FakeEngine.expected(PROMPT, 7, index)


async def test_token_id_zero_is_a_token(dialect: Dialect) -> None:
    """O5: id 0 as a prompt token and as a stop token is not taken for nothing."""
    async with served(dialect, FakeEngine()) as server:
        history = await server.generate(prompt=[0, 0], max_tokens=2)

        assert history.complete().prompt_tokens == 2
        assert check(history) == []


async def test_a_slow_reader_loses_nothing_of_a_fast_engine(dialect: Dialect) -> None:
    """C6: the end does not overtake tokens that wait; what piled up travels together."""
    async with served(dialect, FakeEngine(tokens_per_step=10)) as server:
        call = server.stub.Generate(dialect.generate("slow", PROMPT, max_tokens=2000))
        history = History()
        async for message in call:
            history.messages.append(message)
            if len(history.messages) < 10:
                await asyncio.sleep(0.01)
        history.code = await call.code()

        assert check(history) == []
        assert history.streamed_ids() == FakeEngine.expected(PROMPT, 2000)
        assert len(history.chunks) < 200


async def test_abort_ends_a_stream_with_a_complete(dialect: Dialect) -> None:
    engine = FakeEngine(step_seconds=0.005)
    async with served(dialect, engine) as server:
        running = asyncio.ensure_future(server.generate("gone", max_tokens=4000))
        await until(lambda: engine.statistics()["running"] == 1)
        await server.abort("gone")
        history = await running

        assert check(history) == []
        assert history.code is grpc.StatusCode.OK
        assert history.complete().finish_reason == "abort"
        assert engine.aborts == ["gone"]
        await server.abort("gone")
        await server.abort("never seen")
        assert engine.aborts == ["gone"]


async def test_abort_ends_a_whole_answer_with_what_there_is(dialect: Dialect) -> None:
    engine = FakeEngine(step_seconds=0.001)
    async with served(dialect, engine) as server:
        running = asyncio.ensure_future(server.generate("g", max_tokens=4000, stream=False))
        await until(lambda: server.servicer.statistics()["pending"] > 2)
        await server.abort("g")
        history = await running

        assert check(history) == []
        assert history.complete().finish_reason == "abort"
        ids = list(history.complete().output_ids)
        assert ids == FakeEngine.expected(PROMPT, len(ids))
        assert len(ids) > 2


async def test_an_engine_that_ignores_an_abort_does_not_hold_the_stream(dialect: Dialect) -> None:
    """C4: no token arrives after the abort was acknowledged, whatever the engine does."""
    engine = FakeEngine(step_seconds=0.001, faults=Faults(ignore_abort=True))
    async with served(dialect, engine) as server:
        running = asyncio.ensure_future(server.generate("deaf", max_tokens=4000))
        await until(lambda: engine.statistics()["running"] == 1)
        await server.abort("deaf")
        history = await asyncio.wait_for(running, 2)

        assert check(history) == []
        assert history.complete().finish_reason == "abort"
        await until(lambda: server.servicer.statistics()["in_flight"] == 0)


async def test_abort_touches_only_its_own_id(dialect: Dialect) -> None:
    """Ids are whole words: `req-1` never touches `req-10`."""
    engine = FakeEngine(step_seconds=0.001)
    async with served(dialect, engine) as server:
        ten = asyncio.ensure_future(server.generate("req-10", max_tokens=200))
        one = asyncio.ensure_future(server.generate("req-1", max_tokens=4000))
        await until(lambda: engine.statistics()["running"] == 2)
        await server.abort("req-1")

        assert (await one).complete().finish_reason == "abort"
        assert (await ten).complete().finish_reason == "length"


async def test_an_engines_own_abort_is_told(dialect: Dialect) -> None:
    engine = FakeEngine(faults=Faults(abort_on_its_own_after=4))
    async with served(dialect, engine) as server:
        history = await server.generate(max_tokens=100)

        assert check(history) == []
        assert history.complete().finish_reason == "abort"
        assert engine.aborts == []


async def test_a_duplicate_in_flight_is_refused_and_the_first_unharmed(dialect: Dialect) -> None:
    """O3."""
    engine = FakeEngine(step_seconds=0.002)
    async with served(dialect, engine) as server:
        first = asyncio.ensure_future(server.generate("x", max_tokens=100))
        await until(lambda: engine.statistics()["running"] == 1)
        second = await server.generate("x", max_tokens=5)

        assert second.code is grpc.StatusCode.ALREADY_EXISTS
        assert "request_id" in second.details
        history = await first
        assert check(history) == []
        assert history.complete().completion_tokens == 100
        assert engine.aborts == []


async def test_an_id_can_be_used_again_at_once(dialect: Dialect) -> None:
    """P5 of the published MLX servicer, V9: twenty times in a row, each complete."""
    async with served(dialect, FakeEngine()) as server:
        for _ in range(20):
            history = await server.generate("same", max_tokens=3)
            assert check(history) == []
            assert history.complete().completion_tokens == 3


INVALID: dict[str, tuple[dict[str, Any], str]] = {
    "no id": ({"request_id": ""}, "request_id"),
    "empty prompt": ({"prompt": []}, "input_ids"),
    "id outside the vocabulary": ({"prompt": [5, VOCAB]}, "input_ids[1]"),
    "huge id": ({"prompt": [2**32 - 1]}, "input_ids"),
    "prompt as long as the context": ({"prompt": [5] * CONTEXT}, "input_ids"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens"),
    "negative temperature": ({"temperature": -1.0}, "temperature"),
    "NaN temperature": ({"temperature": float("nan")}, "temperature"),
    "infinite temperature": ({"temperature": float("inf")}, "temperature"),
    "top_p above 1": ({"top_p": 1.5}, "top_p"),
    "negative top_p": ({"top_p": -0.1}, "top_p"),
    "min_p above 1": ({"min_p": 2.0}, "min_p"),
    "negative min_p": ({"min_p": -0.5}, "min_p"),
    "NaN penalty": ({"frequency_penalty": float("nan")}, "frequency_penalty"),
    "infinite penalty": ({"presence_penalty": float("-inf")}, "presence_penalty"),
    "negative repetition": ({"repetition_penalty": -1.0}, "repetition_penalty"),
    "bias outside the vocabulary": ({"logit_bias": {VOCAB: 1.0}}, "logit_bias"),
    "negative bias key": ({"logit_bias": {-1: 1.0}}, "logit_bias"),
    "NaN bias": ({"logit_bias": {5: float("nan")}}, "logit_bias"),
    "stop id outside the vocabulary": ({"stop_token_ids": [VOCAB]}, "stop_token_ids"),
    "negative logprobs": ({"logprobs": -2}, "logprobs"),
    "no choice": ({"n": 129}, "n"),
    "empty stop string": ({"stop": ["a", ""]}, "stop"),
}


@pytest.mark.parametrize(
    ("dialect", "case"),
    [(d, case) for case in sorted(INVALID) for d in that_can_say(*INVALID[case][0])],
    ids=lambda value: value.engine if isinstance(value, Dialect) else value,
)
async def test_invalid_input_names_its_field_and_leaves_the_engine_alone(
    dialect: Dialect, case: str
) -> None:
    """R1, P7: INVALID_ARGUMENT before any engine work; the next request is fine."""
    options, field = INVALID[case]
    engine = FakeEngine()
    async with served(dialect, engine) as server:
        options = {"request_id": "bad", "max_tokens": 5, **options}
        history = await server.generate(**options)

        assert history.code is grpc.StatusCode.INVALID_ARGUMENT, history.details
        for name in (field, dialect.renames.get(field, field)):
            if name in history.details:
                break
        else:
            pytest.fail(f"{history.details!r} does not name {field}")
        assert engine.submitted == []
        assert check(await server.generate("good", max_tokens=2)) == []


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (InvalidArgument("prompt", "too odd"), grpc.StatusCode.INVALID_ARGUMENT),
        (Exhausted("queue full"), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (Unavailable("paused"), grpc.StatusCode.UNAVAILABLE),
        (ValueError("what a bug"), grpc.StatusCode.INTERNAL),
        (RuntimeError(), grpc.StatusCode.INTERNAL),
    ],
)
async def test_a_refusal_becomes_the_status_of_the_table(
    dialect: Dialect, error: Exception, code: grpc.StatusCode
) -> None:
    """R1: the table's code, words that are never empty, no abort for what the engine refused."""
    engine = FakeEngine(faults=Faults(refuse=error))
    async with served(dialect, engine) as server:
        history = await server.generate()

        assert history.code is code
        assert history.details
        assert "0x" not in history.details
        assert engine.aborts == []
        assert server.servicer.statistics()["in_flight"] == 0


async def test_an_unknown_error_tells_its_innermost_cause(dialect: Dialect) -> None:
    try:
        try:
            raise ValueError("the disk is on fire")
        except ValueError as cause:
            raise RuntimeError("step failed") from cause
    except RuntimeError as error:
        faults = Faults(fail_after=3, error=error)
    async with served(dialect, FakeEngine(faults=faults)) as server:
        history = await server.generate(max_tokens=10)

        assert history.code is grpc.StatusCode.INTERNAL
        assert "the disk is on fire" in history.details


async def test_tokens_before_a_failure_arrive_and_then_the_status(dialect: Dialect) -> None:
    """O7: never a quiet OK."""
    async with served(dialect, FakeEngine(faults=Faults(fail_after=5))) as server:
        history = await server.generate(max_tokens=10)

        assert history.streamed_ids() == FakeEngine.expected(PROMPT, 5)
        assert history.completes == []
        assert history.code is grpc.StatusCode.INTERNAL


async def test_a_dead_engine_ends_every_stream_unavailable(dialect: Dialect) -> None:
    """O2, V7: UNAVAILABLE at once, readiness and liveness down, later requests fail fast."""
    engine = FakeEngine(step_seconds=0.002)
    async with served(dialect, engine) as server:
        running = [
            asyncio.ensure_future(server.generate(f"r{i}", max_tokens=4000)) for i in range(5)
        ]
        await until(lambda: engine.statistics()["running"] == 5)
        engine.die("out of memory")
        histories = await asyncio.wait_for(asyncio.gather(*running), 1)

        assert {h.code for h in histories} == {grpc.StatusCode.UNAVAILABLE}
        assert all("out of memory" in h.details for h in histories)
        assert not server.board.ready
        assert not server.board.alive
        assert (await server.generate("later")).code is grpc.StatusCode.UNAVAILABLE
        assert server.servicer.statistics()["in_flight"] == 0


async def test_before_it_is_ready_nothing_answers_ok(dialect: Dialect) -> None:
    """G6: the gateway takes any OK for ready."""
    async with served(dialect, FakeEngine(), ready=False) as server:
        assert (await server.generate()).code is grpc.StatusCode.UNAVAILABLE
        for name in ("HealthCheck", "GetModelInfo", "GetServerInfo"):
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await getattr(server.stub, name)(getattr(dialect.pb, f"{name}Request")())
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE


@pytest.mark.parametrize("dialect", that_can_say("stop"), ids=lambda d: d.engine)
async def test_a_missing_feature_has_one_wording(dialect: Dialect) -> None:
    engine = FakeEngine(features=frozenset())
    async with served(dialect, engine) as server:
        history = await server.generate(stop=["."])

        assert history.code is grpc.StatusCode.UNIMPLEMENTED
        assert history.details == "the fake engine does not support stop strings"


async def test_a_silent_engine_ends_at_the_callers_deadline(dialect: Dialect) -> None:
    """DEADLINE_EXCEEDED for the caller, exactly one abort for the engine."""
    engine = FakeEngine(faults=Faults(mute=True))
    async with served(dialect, engine) as server:
        call = server.stub.Generate(dialect.generate("mute", PROMPT), timeout=0.1)
        history = await History().record(call)

        assert history.code is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: engine.aborts == ["mute"])
        assert server.servicer.statistics()["in_flight"] == 0


async def test_health_check_agrees_with_readiness(dialect: Dialect) -> None:
    engine = FakeEngine()
    async with served(dialect, engine) as server:
        assert (await health(server)).healthy
        server.board.draining()
        answer = await health(server)
        assert not answer.healthy
        assert "draining" in answer.message


async def health(server: Served) -> Any:
    return await server.stub.HealthCheck(server.dialect.pb.HealthCheckRequest())
