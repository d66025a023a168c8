"""Control calls are matched to their replies, survive who left, and ask every rank."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest
from sglang.srt.managers import io_struct as io
from smg_grpc_proto.generated import common_pb2
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.payloads import Adapter
from smg_grpc_servicer.sglang import control
from smg_grpc_servicer.sglang.limits import Limits
from tests.support.sglang_served import ServedSglang, request, served_sglang
from tests.support.sglang_stub import Row, batch, stop
from tests.support.wait import until

CODE = grpc.StatusCode
FLUSH = common_pb2.FlushCacheRequest()


async def test_flush_and_profile(tmp_path: Path) -> None:
    async with served_sglang() as server:
        server.scheduler.answers = {
            io.FlushCacheReqInput: lambda r: io.FlushCacheReqOutput(success=True),
            io.ProfileReq: lambda r: io.ProfileReqOutput(success=True, message="Succeeded."),
        }
        assert (await server.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=2.5))).success
        folder = str(tmp_path)
        options = common_pb2.StartProfileRequest(output_dir=folder, num_steps=3, with_stack=False)
        assert (await server.stub.StartProfile(options)).message == "Succeeded."
        assert (await server.stub.StopProfile(common_pb2.StopProfileRequest())).success
        flush, begin, end = server.scheduler.received
        assert flush.timeout_s == pytest.approx(2.5, abs=0.5)
        assert (begin.output_dir, begin.num_steps) == (folder, 3)
        assert (begin.with_stack, begin.record_shapes) == (False, True)
        assert end.req_type is io.ProfileReqType.STOP_PROFILE
        await server.idle()


async def test_a_flush_that_is_refused_says_why() -> None:
    async with served_sglang() as server:
        server.scheduler.answers = {
            io.FlushCacheReqInput: lambda r: io.FlushCacheReqOutput(success=False)
        }
        answer = await server.stub.FlushCache(FLUSH)
        assert not answer.success
        assert "requests are running" in answer.message


async def test_a_caller_that_left_does_not_keep_others_from_flushing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang refuses a second call while one waits: who has time asks again until it is over, and
    no call waits at the scheduler for longer than a little.
    """
    monkeypatch.setattr(control, "AGAIN_SECONDS", 0.001)
    answers = iter([(False, "Another flush_cache is already in progress.")] * 3 + [(True, "")])

    def answer(asked: Any) -> Any:
        success, words = next(answers)
        return io.FlushCacheReqOutput(success=success, message=words)

    async with served_sglang() as server:
        server.scheduler.answers = {io.FlushCacheReqInput: answer}
        request = common_pb2.FlushCacheRequest(timeout_s=1000)
        assert (await server.stub.FlushCache(request)).success
        waits = [sent.timeout_s for sent in server.scheduler.received]
        assert waits == [control.WAIT_SECONDS] * 4
        await server.idle()


async def test_a_flush_ends_when_its_time_is_over() -> None:
    async with served_sglang() as server:
        words = "Timed out waiting for idle state."
        server.scheduler.answers = {
            io.FlushCacheReqInput: lambda r: io.FlushCacheReqOutput(success=False, message=words)
        }
        with pytest.raises(grpc.aio.AioRpcError, match=r"not flushed in 0\.05 s") as refused:
            await server.stub.FlushCache(common_pb2.FlushCacheRequest(timeout_s=0.05))
        assert refused.value.code() is CODE.DEADLINE_EXCEEDED
        await server.idle()


async def test_row_9_a_late_reply_is_nobody_s() -> None:
    """§11-9: after a timeout the next call of the kind gets its own answer."""
    async with served_sglang() as server:
        manager = server.manager
        with pytest.raises(asyncio.TimeoutError):
            await manager.send_communicator_req(
                io.FlushCacheReqInput(), "flush_cache_communicator", 0.05
            )
        second = asyncio.ensure_future(
            manager.send_communicator_req(io.FlushCacheReqInput(), "flush_cache_communicator", 5)
        )
        old, new = await server.sent(2)
        await server.scheduler.reply(old, io.FlushCacheReqOutput(success=False, message="old"))
        await server.scheduler.reply(new, io.FlushCacheReqOutput(success=True, message="new"))
        assert [reply.message for reply in await second] == ["new"]
        await server.idle()


async def test_a_client_that_left_leaves_no_call_behind() -> None:
    async with served_sglang() as server:
        call = server.stub.FlushCache(FLUSH)
        (old,) = await server.sent()
        call.cancel()
        await server.idle()
        again = server.stub.FlushCache(FLUSH)
        new = (await server.sent(2))[1]
        await server.scheduler.reply(old, io.FlushCacheReqOutput(success=False))
        await server.scheduler.reply(new, io.FlushCacheReqOutput(success=True))
        assert (await again).success


async def test_calls_of_one_kind_may_overlap() -> None:
    async with served_sglang() as server:
        calls = [
            asyncio.ensure_future(
                server.manager.send_communicator_req(
                    io.GetInternalStateReq(), "get_internal_state_communicator"
                )
            )
            for _ in range(2)
        ]
        sent = await server.sent(2)
        for at in (1, 0):
            await server.scheduler.reply(
                sent[at], io.GetInternalStateReqOutput(internal_state={"at": at})
            )
        found = [replies[0].internal_state["at"] for replies in await asyncio.gather(*calls)]
        assert found == [0, 1]


async def test_row_27_every_rank_is_waited_for() -> None:
    """§11-27: the first rank's answer is not everybody's."""
    async with served_sglang(ranks=3) as server:
        call = server.stub.FlushCache(FLUSH)
        (sent,) = await server.sent()
        for at in range(3):
            assert not call.done()
            answer = io.FlushCacheReqOutput(success=at != 1, message="busy" if at == 1 else "")
            await server.scheduler.reply(sent, answer)
        answer = await call
        assert (answer.success, "busy" in answer.message) == (False, True)


async def test_an_unknown_communicator_is_refused() -> None:
    async with served_sglang() as server:
        with pytest.raises(ValueError, match="no communicator named"):
            await server.manager.send_communicator_req(io.ProfileReq(), "weather_communicator")


async def test_the_internal_state_of_each_rank() -> None:
    async with served_sglang(ranks=2) as server:
        asked = asyncio.ensure_future(server.engine.internal_state())
        (sent,) = await server.sent()
        for rank in range(2):
            state = io.GetInternalStateReqOutput(internal_state={"rank": rank})
            await server.scheduler.reply(sent, state)
        assert sorted(state["rank"] for state in await asked) == [0, 1]


# Health.


async def test_health_asks_the_scheduler_and_takes_any_word_for_life() -> None:
    async with served_sglang() as server:
        server.manager.last_receive = None
        call = server.stub.HealthCheck(pb.HealthCheckRequest())
        (probe,) = await server.sent()
        assert probe.rid.startswith("HEALTH_CHECK")
        assert probe.sampling_params.max_new_tokens == 1
        await server.scheduler.say_aside(io.HealthCheckOutput())
        assert (await call).healthy
        assert (await server.stub.HealthCheck(pb.HealthCheckRequest())).healthy
        assert len(server.scheduler.received) == 1, "it spoke a moment ago"
        await server.idle()


async def test_a_silent_scheduler_is_not_healthy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SGLANG_HEALTH_CHECK_TIMEOUT", "0.05")
    async with served_sglang() as server:
        server.manager.last_receive = None
        calls = [server.stub.HealthCheck(pb.HealthCheckRequest()) for _ in range(3)]
        for call in calls:
            answer = await call
            assert not answer.healthy
            assert "has not said anything" in answer.message
        (probe,) = await server.sent()
        await server.aborted(probe.rid)
        await server.idle()


# LoRA.

LORA = Limits(lora=True, startup_adapters=(Adapter("s1", "start", "/a/start", True),))


def answer(refuse: str = "") -> Any:
    return lambda request: io.LoRAUpdateOutput(
        success=not refuse, error_message=refuse or None, loaded_adapters={}
    )


def load(adapter_id: str = "x1", name: str = "x") -> Any:
    return pb.LoadLoRAAdapterRequest(lora_name=name, lora_path="/a/x", lora_id=adapter_id)


async def listed(server: ServedSglang) -> list[str]:
    answer = await server.stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest())
    return [adapter.lora_id for adapter in answer.loaded_adapters]


async def test_an_adapter_is_loaded_used_listed_and_unloaded() -> None:
    async with served_sglang(limits=LORA) as server:
        server.scheduler.answers = {
            io.LoadLoRAAdapterReqInput: answer(),
            io.UnloadLoRAAdapterReqInput: answer(),
        }
        assert await listed(server) == ["s1"]
        done = await server.stub.LoadLoRAAdapter(load())
        assert (done.success, list(done.loaded_lora_ids)) == (True, ["s1", "x1"])

        reading = asyncio.ensure_future(server.generate(request(lora_id="x1")))
        sent = (await server.sent(2))[1]
        assert sent.lora_id == "x1"
        unloading = server.stub.UnloadLoRAAdapter(
            pb.UnloadLoRAAdapterRequest(lora_name="x", lora_id="x1")
        )
        await until(lambda: server.engine.statistics()["adapter_changes"] == 1)
        refused = await server.generate(request("late", lora_id="x1"))
        assert refused.code is CODE.INVALID_ARGUMENT
        assert "being unloaded" in refused.details
        assert len(server.scheduler.received) == 2, "a request still uses it"
        await server.scheduler.say(batch(Row(sent.rid, [9], stop())))
        assert (await reading).code is CODE.OK
        done = await unloading
        assert (done.success, list(done.loaded_lora_ids)) == (True, ["s1"])
        await server.idle()


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        (load("s1", "other"), "lora_id"),
        (load("other", "start"), "lora_name"),
        (load(""), "lora_id"),
        (load("y", ""), "lora_name"),
    ],
)
async def test_an_adapter_that_would_end_the_scheduler_is_refused(asked: Any, field: str) -> None:
    async with served_sglang(limits=LORA) as server:
        with pytest.raises(grpc.aio.AioRpcError, match=f"{field}: ") as caught:
            await server.stub.LoadLoRAAdapter(asked)
        assert caught.value.code() is CODE.INVALID_ARGUMENT
        unknown = pb.UnloadLoRAAdapterRequest(lora_name="unknown")
        with pytest.raises(grpc.aio.AioRpcError, match="lora_name: "):
            await server.stub.UnloadLoRAAdapter(unknown)
        history = await server.generate(request(lora_id="unknown"))
        assert history.code is CODE.INVALID_ARGUMENT
        assert "lora_id" in history.details
        assert server.scheduler.received == []
        await server.idle()


async def test_what_the_scheduler_refuses_is_told_and_not_kept() -> None:
    async with served_sglang(limits=LORA) as server:
        server.scheduler.answers = {io.LoadLoRAAdapterReqInput: answer("rank 64 is too large")}
        done = await server.stub.LoadLoRAAdapter(load())
        assert (done.success, done.message) == (False, "rank 64 is too large")
        assert await listed(server) == ["s1"]
        server.scheduler.answers = {io.LoadLoRAAdapterReqInput: answer()}
        assert (await server.stub.LoadLoRAAdapter(load())).success


async def test_a_load_goes_on_when_its_client_leaves() -> None:
    """The table and the scheduler must be of one mind."""
    async with served_sglang(limits=LORA) as server:
        call = server.stub.LoadLoRAAdapter(load())
        (sent,) = await server.sent()
        call.cancel()
        await server.scheduler.reply(sent, answer()(sent))
        await until(lambda: len(server.engine.adapters()) == 2)
        await server.idle()


async def test_without_lora_nothing_is_sent() -> None:
    async with served_sglang() as server:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await server.stub.LoadLoRAAdapter(load())
        assert caught.value.code() is CODE.UNIMPLEMENTED
        assert (await server.generate(request(lora_id="x"))).code is CODE.UNIMPLEMENTED
        assert server.scheduler.received == []
