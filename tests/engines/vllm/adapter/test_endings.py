"""Cancels and aborts reach vLLM once each; a dead engine ends everything, and says so."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import Any

import grpc
import pytest
from smg_grpc_proto.generated import vllm_engine_pb2 as pb

from smg_grpc_servicer.core.errors import Unavailable
from smg_grpc_servicer.core.health import State, StatusBoard
from smg_grpc_servicer.testing.history import History
from smg_grpc_servicer.vllm import servicer as servicers
from smg_grpc_servicer.vllm.wire import VllmWire
from tests.support.stub_async_llm import StubAsyncLLM
from tests.support.vllm_config import kv_config, vllm_config
from tests.support.vllm_served import PlainAsyncLLM, ServedVllm, served_vllm
from tests.support.wait import until

CODE = grpc.StatusCode
LONG: dict[str, Any] = {"max_tokens": 100_000, "prompt": [5, 6]}
DECODE = {"kv_transfer_params_json": '{"do_remote_prefill": true, "x": [1, null]}'}
EITHER = pytest.mark.parametrize("kind", [StubAsyncLLM, PlainAsyncLLM])


def slow() -> Any:
    return asyncio.sleep(0.001)


async def begun(server: ServedVllm, request_id: str = "r", **options: Any) -> Any:
    """A call that has had its first message."""
    call = server.stub.Generate(server.request(request_id, **{**LONG, **options}))
    await anext(call.__aiter__())
    return call


@EITHER
async def test_a_cancel_aborts_once_and_at_once(kind: type[StubAsyncLLM]) -> None:
    """C3 and V1: within 100 ms, and exactly once."""
    async with served_vllm(kind(step=slow)) as server:
        calls = [await begun(server, f"r-{at}") for at in range(20)]
        for call in calls:
            call.cancel()
        start = monotonic()
        await until(lambda: len(server.llm.aborts) == 20, seconds=2)
        assert monotonic() - start < 1.0
        await server.idle()
        assert len({one for one, _ in server.llm.aborts}) == 20
        assert all(internal for _, internal in server.llm.aborts)


async def test_a_cancel_while_vllm_takes_the_request_finds_it() -> None:
    """C3: vLLM may have it although it has not said so yet."""
    llm = StubAsyncLLM(step=slow)
    llm.faults.hold_add = asyncio.Event()
    async with served_vllm(llm) as server:
        call = server.stub.Generate(server.request(**LONG))
        await until(lambda: llm.calls != [])
        call.cancel()
        await until(lambda: llm.aborts != [])
        await server.idle()
        assert llm.aborts == [(llm.calls[0].request_id, False)]


async def test_what_vllm_noted_down_and_could_not_send_is_withdrawn() -> None:
    """It would count for vLLM's own bounds for ever."""
    llm = StubAsyncLLM(step=slow)
    llm.faults.refuse_late = UnicodeEncodeError("utf-8", "x", 0, 1, "no")
    async with served_vllm(llm) as server:
        assert (await server.generate()).code is CODE.INTERNAL
        await until(lambda: llm.aborts != [])
        assert llm.aborts == [(llm.calls[0].request_id, False)]
        assert llm.in_flight == 0
        await server.idle()


async def test_what_vllm_refuses_is_not_aborted() -> None:
    llm = StubAsyncLLM(step=slow)
    llm.faults.refuse = RuntimeError("no")
    async with served_vllm(llm) as server:
        assert (await server.generate()).code is CODE.INTERNAL
        await server.idle()
        assert llm.aborts == []


async def test_an_abort_does_not_wait_for_a_grammar() -> None:
    """A large schema compiles for seconds before vLLM takes the request."""
    llm = StubAsyncLLM(step=slow)
    llm.faults.hold_add = asyncio.Event()
    async with served_vllm(llm) as server:
        request = server.request(**LONG)
        request.sampling_params.json_schema = "{}"
        reading = asyncio.ensure_future(History(stream=True).record(server.stub.Generate(request)))
        await until(lambda: llm.calls != [])
        await server.stub.Abort(pb.AbortRequest(request_ids=["r"]))
        history = await asyncio.wait_for(reading, 5)
        assert history.complete().finish_reason == "abort"
        await server.idle()
        assert llm.aborts == [(llm.calls[0].request_id, False)]


@EITHER
async def test_an_abort_ends_the_stream_with_its_complete(kind: type[StubAsyncLLM]) -> None:
    async with served_vllm(kind(step=slow)) as server:
        call = await begun(server)
        await server.stub.Abort(pb.AbortRequest(request_ids=["r", "unknown"]))
        history = await History(stream=True).record(call)
        assert history.code is CODE.OK
        assert history.complete().finish_reason == "abort"
        await server.idle()
        assert len(server.llm.aborts) == 1


async def test_an_id_in_flight_is_refused_and_left_alone() -> None:
    """O3: abort of the first killed the second."""
    async with served_vllm(StubAsyncLLM(step=slow)) as server:
        call = await begun(server)
        second = await server.generate()
        assert second.code is CODE.ALREADY_EXISTS
        assert server.llm.aborts == []
        assert len((await anext(call.__aiter__())).chunk.token_ids) > 0
        call.cancel()


@EITHER
async def test_a_dead_engine_ends_every_stream_within_a_second(
    kind: type[StubAsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O2 and V7: UNAVAILABLE, readiness and liveness go down, the process is to end."""
    exits: list[float] = []
    monkeypatch.setattr(servicers, "exit_later", exits.append)
    async with served_vllm(kind(step=slow)) as server:
        assert await server.serving()
        assert await server.serving(VllmWire.service)
        calls = [await begun(server, f"r-{at}") for at in range(4)]
        server.llm.die()
        ended = [History().record(call) for call in calls]
        for history in await asyncio.wait_for(asyncio.gather(*ended), 1.0):
            assert history.code is CODE.UNAVAILABLE
            assert history.details.startswith("the engine is gone")
        await until(lambda: exits == [10.0], seconds=1.0)
        assert not await server.serving()
        assert not await server.serving(VllmWire.service)
        assert not (await server.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        late = await server.generate("late")
        assert late.code is CODE.UNAVAILABLE
        await server.idle()
        assert server.llm.aborts == [], "there is nothing left to abort"


@EITHER
async def test_a_death_that_vllm_tells_nobody_ends_the_streams_too(
    kind: type[StubAsyncLLM], monkeypatch: pytest.MonkeyPatch
) -> None:
    """O1: the process is gone, its output loop hangs, and only `errored` says so."""
    exits: list[float] = []
    monkeypatch.setattr(servicers, "exit_later", exits.append)
    async with served_vllm(kind(step=slow)) as server:
        calls = [await begun(server, f"r-{at}") for at in range(4)]
        server.llm.faults.mute = True
        server.llm.dead = True
        ended = [History().record(call) for call in calls]
        for history in await asyncio.wait_for(asyncio.gather(*ended), 1.0):
            assert history.code is CODE.UNAVAILABLE
        assert exits == [10.0]
        await until(lambda: server.servicer.statistics()["running"] == 0)
        server.llm.forget()


async def test_whoever_brings_a_board_decides_over_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    exits: list[float] = []
    monkeypatch.setattr(servicers, "exit_later", exits.append)
    board = StatusBoard()
    async with served_vllm(StubAsyncLLM(), board=board) as server:
        assert board.state is State.LOADING
        history = await server.generate()
        assert history.code is CODE.UNAVAILABLE
        board.serving()
        assert await server.serving(VllmWire.service)
        server.llm.die()
        await until(lambda: exits == [0.0])


async def test_the_launchers_stop_is_a_drain_and_no_death(caplog: pytest.LogCaptureFixture) -> None:
    async with served_vllm(StubAsyncLLM(step=slow)) as server:
        call = await begun(server)
        server.health.set_not_serving()
        assert not await server.serving(VllmWire.service)
        assert await server.serving(), "it is alive: no restart is asked for"
        refused = await server.generate("late")
        assert refused.code is CODE.UNAVAILABLE
        assert len((await anext(call.__aiter__())).chunk.token_ids) > 0
        call.cancel()
        await server.idle()
        server.llm.shutdown()
        await until(lambda: server.servicer.statistics()["timers"] == 0)
        assert server.servicer.board.death is None
        with pytest.raises(Unavailable, match="draining"):
            server.servicer.board.require_accepting()
    assert [r for r in caplog.records if r.levelname == "ERROR"] == []


async def test_an_answer_sent_whole_is_no_stall(monkeypatch: pytest.MonkeyPatch) -> None:
    """O1: vLLM's steps are the pulse; an engine that stops stepping is not ready."""
    monkeypatch.setenv("SMG_SERVICER_STALL_SECONDS", "0.05")
    llm = StubAsyncLLM(step=slow)
    async with served_vllm(llm) as server:
        call = server.stub.Generate(server.request(stream=False, **LONG))
        reading = asyncio.ensure_future(call.read())
        await until(lambda: llm.in_flight == 1)
        start = monotonic()
        while monotonic() - start < 0.2:
            assert await server.serving(VllmWire.service)
        llm.faults.mute = True
        await until(lambda: server.servicer.board.stalled)
        assert not await server.serving(VllmWire.service)
        assert await server.serving()
        call.cancel()
        await asyncio.gather(reading, return_exceptions=True)


# KV transfer.


def connected() -> StubAsyncLLM:
    return StubAsyncLLM(vllm_config(kv_transfer_config=kv_config()), ranks=(4, 5), step=slow)


async def test_parameters_go_both_ways_as_they_are() -> None:
    """K1: nested values, big integers and null, not only host and port."""
    llm = connected()
    back = {"remote_block_ids": [[1, 2]], "big": 2**53 + 1, "none": None, "remote_host": "h",
            "remote_port": 80}  # fmt: skip
    llm.faults.kv_transfer_params = back
    async with served_vllm(llm) as server:
        sent = '{"do_remote_decode":true,"nested":{"a":[1,null]},"big":9007199254740993}'
        history = await server.generate(max_tokens=1, request={"kv_transfer_params_json": sent})
        got = llm.calls[0].params.extra_args["kv_transfer_params"]
        assert got == {"do_remote_decode": True, "nested": {"a": [1, None]}, "big": 2**53 + 1}
        complete = history.complete()
        expected = (
            '{"remote_block_ids": [[1, 2]], "big": 9007199254740993, "none": null, '
            '"remote_host": "h", "remote_port": 80}'
        )
        assert complete.kv_transfer_params_json == expected
        assert complete.kv_transfer_params.remote_port == 80


async def test_parameters_that_are_no_json_are_left_out() -> None:
    """Weak point 21: NaN is no JSON for the gateway."""
    llm = connected()
    llm.faults.kv_transfer_params = {"x": float("nan")}
    async with served_vllm(llm) as server:
        complete = (await server.generate(max_tokens=1)).complete()
        assert not complete.HasField("kv_transfer_params_json")


async def test_a_decode_without_a_connector_is_refused() -> None:
    """It can kill an engine that has no connector."""
    async with served_vllm(StubAsyncLLM()) as server:
        history = await server.generate(request=DECODE)
        assert history.code is CODE.INVALID_ARGUMENT
        assert history.details.startswith("kv_transfer_params_json: ")
        assert server.llm.calls == []
        assert server.llm.notices == []


@pytest.mark.parametrize(
    ("options", "code"),
    [
        ({"temperature": -1.0}, CODE.INVALID_ARGUMENT),
        ({"presence_penalty": 5.0}, CODE.INVALID_ARGUMENT),
        ({"prompt": []}, CODE.INVALID_ARGUMENT),
    ],
)
async def test_a_refused_decode_is_told_to_the_connector_once(
    options: dict[str, Any], code: grpc.StatusCode
) -> None:
    """K3: the prefill's blocks stay pinned otherwise; weak point 13: it goes to the right rank."""
    async with served_vllm(connected()) as server:
        history = await server.generate("r", request={**DECODE, "data_parallel_rank": 5}, **options)
        assert history.code is code
        await until(lambda: server.llm.notices != [])
        await server.idle()
        ((notice, params, rank),) = server.llm.notices
        assert notice.startswith("r-")
        assert params == {"do_remote_prefill": True, "x": [1, None]}
        assert rank == 1


async def test_a_decode_that_vllm_refuses_is_told_and_one_it_takes_is_not() -> None:
    llm = connected()
    async with served_vllm(llm) as server:
        assert (await server.generate(max_tokens=2, request=DECODE)).code is CODE.OK
        assert llm.notices == []
        llm.faults.refuse = ValueError("no room")
        assert (await server.generate(request=DECODE)).code is CODE.INTERNAL
        await until(lambda: len(llm.notices) == 1)
        assert llm.notices[0][2] is None, "it was pinned to no rank"


async def test_a_duplicate_decode_leaves_the_blocks_to_the_first() -> None:
    async with served_vllm(connected()) as server:
        call = await begun(server, request=DECODE)
        assert (await server.generate(request=DECODE)).code is CODE.ALREADY_EXISTS
        assert server.llm.notices == []
        call.cancel()


async def test_a_draining_server_tells_the_connector_too() -> None:
    async with served_vllm(connected()) as server:
        server.health.set_not_serving()
        assert (await server.generate(request=DECODE)).code is CODE.UNAVAILABLE
        await until(lambda: len(server.llm.notices) == 1)
