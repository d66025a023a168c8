"""`--max-loaded-loras`: the adapter used longest ago makes way, and is back when asked for."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import pytest
from sglang.srt.managers import io_struct as io
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.payloads import Adapter
from smg_grpc_servicer.sglang.limits import Limits
from tests.support.sglang_served import ServedSglang, request, served_sglang
from tests.support.sglang_stub import Row, batch, stop
from tests.support.wait import until

CODE = grpc.StatusCode
TWO = Limits(
    lora=True,
    max_adapters=2,
    startup_adapters=(Adapter("p", "pinned", "/p", True), Adapter("a", "first", "/a")),
)


class Ranks:
    """What the scheduler has, as SGLang's keeps it: it asserts that an id is new."""

    def __init__(self, server: ServedSglang, *loaded: str) -> None:
        self.loaded = set(loaded)
        self.stuck: set[str] = set()
        """Ids that it does not unload."""
        server.scheduler.answers = {
            io.LoadLoRAAdapterReqInput: self._load,
            io.UnloadLoRAAdapterReqInput: self._unload,
        }

    def _load(self, request: Any) -> Any:
        assert request.lora_id not in self.loaded
        self.loaded.add(request.lora_id)
        return io.LoRAUpdateOutput(success=True, error_message=None, loaded_adapters={})

    def _unload(self, request: Any) -> Any:
        stuck = request.lora_id in self.stuck
        if not stuck:
            self.loaded.remove(request.lora_id)
        words = "it sticks" if stuck else None
        return io.LoRAUpdateOutput(success=not stuck, error_message=words, loaded_adapters={})


def load(adapter_id: str, *, pinned: bool = False) -> Any:
    return pb.LoadLoRAAdapterRequest(
        lora_id=adapter_id, lora_name=f"name-{adapter_id}", lora_path="/x", pinned=pinned
    )


async def listed(server: ServedSglang) -> set[str]:
    answer = await server.stub.ListLoadedLoRAAdapters(pb.ListLoadedLoRAAdaptersRequest())
    return {adapter.lora_id for adapter in answer.loaded_adapters}


def prompts(server: ServedSglang) -> list[Any]:
    kind = io.TokenizedGenerateReqInput
    return [sent for sent in server.scheduler.received if isinstance(sent, kind)]


async def test_the_one_used_longest_ago_makes_way_and_comes_back() -> None:
    limits = Limits(lora=True, max_adapters=2)
    async with served_sglang(limits=limits, serve=True) as server:
        ranks = Ranks(server)
        for name in ("a", "b"):
            assert (await server.stub.LoadLoRAAdapter(load(name))).success
        assert (await server.generate(request("uses-a", lora_id="a"))).code is CODE.OK
        done = await server.stub.LoadLoRAAdapter(load("c"))
        assert (done.success, set(done.loaded_lora_ids)) == (True, {"a", "c"})
        assert ranks.loaded == {"a", "c"}

        together = [server.generate(request(f"b-{at}", lora_id="b")) for at in range(3)]
        assert {history.code for history in await asyncio.gather(*together)} == {CODE.OK}
        assert await listed(server) == ranks.loaded == {"b", "c"}
        await server.idle()


async def test_one_in_use_makes_way_when_its_requests_have_ended() -> None:
    """A request that names it meanwhile waits and has it loaded again."""
    async with served_sglang(limits=TWO) as server:
        ranks = Ranks(server, "p", "a")
        running = asyncio.ensure_future(server.generate(request("runs", lora_id="a")))
        (first,) = await server.sent()
        loading = asyncio.ensure_future(server.stub.LoadLoRAAdapter(load("b")))
        await until(lambda: "b" in ranks.loaded)
        waiting = asyncio.ensure_future(server.generate(request("waits", lora_id="a")))
        await until(lambda: server.engine.statistics()["adapter_changes"] == 2)
        assert ranks.loaded == {"p", "a", "b"}
        assert len(prompts(server)) == 1
        await server.scheduler.say(batch(Row(first.rid, [9], stop(), completion_tokens=1)))
        assert (await running).code is CODE.OK
        assert (await loading).success
        await until(lambda: len(prompts(server)) == 2)
        assert ranks.loaded == {"p", "a"}
        second = prompts(server)[1]
        assert second.lora_id == "a"
        await server.scheduler.say(batch(Row(second.rid, [9], stop(), completion_tokens=1)))
        assert (await waiting).code is CODE.OK
        await server.idle()


@pytest.mark.parametrize("how", ["abort", "stop"])
async def test_who_waits_for_an_adapter_can_be_ended(how: str) -> None:
    """The one in its way is in use for as long as its request likes."""
    async with served_sglang(limits=TWO) as server:
        ranks = Ranks(server, "p", "a")
        running = server.stub.Generate(request("runs", lora_id="a"))
        await server.sent()
        loading = asyncio.ensure_future(server.stub.LoadLoRAAdapter(load("b")))
        await until(lambda: "b" in ranks.loaded)
        waiting = asyncio.ensure_future(
            server.generate(request("waits", lora_id="a", stream=False))
        )
        await until(lambda: server.engine.statistics()["adapter_changes"] == 2)
        if how == "abort":
            await server.stub.Abort(pb.AbortRequest(request_id="waits"))
            assert (await waiting).complete().finish_reason == "abort"
        else:
            await server.engine.close()
            assert (await waiting).code is CODE.UNAVAILABLE
            with pytest.raises(grpc.aio.AioRpcError, match="the server stops") as caught:
                await loading
            assert caught.value.code() is CODE.UNAVAILABLE
        running.cancel()
        await asyncio.gather(loading, return_exceptions=True)
        await server.idle()


async def test_pinned_ones_stay() -> None:
    """SGLang's own server would load another, drop it at once and call that a success."""
    limits = Limits(lora=True, max_adapters=1, startup_adapters=TWO.startup_adapters[:1])
    async with served_sglang(limits=limits) as server:
        Ranks(server, "p")
        with pytest.raises(grpc.aio.AioRpcError, match="--max-loaded-loras") as caught:
            await server.stub.LoadLoRAAdapter(load("b"))
        assert caught.value.code() is CODE.FAILED_PRECONDITION
        assert server.scheduler.received == []


async def test_one_that_was_unloaded_does_not_come_back() -> None:
    async with served_sglang(limits=TWO) as server:
        ranks = Ranks(server, "p", "a")
        assert (await server.stub.LoadLoRAAdapter(load("b"))).success
        assert ranks.loaded == {"p", "b"}
        gone = await server.stub.UnloadLoRAAdapter(pb.UnloadLoRAAdapterRequest(lora_name="first"))
        assert gone.success
        history = await server.generate(request(lora_id="a"))
        assert history.code is CODE.INVALID_ARGUMENT
        # Its id and its name are free again.
        again = pb.LoadLoRAAdapterRequest(lora_id="a", lora_name="first", lora_path="/a")
        assert (await server.stub.LoadLoRAAdapter(again)).success
        assert ranks.loaded == {"p", "a"}
        await server.idle()


async def test_one_that_the_scheduler_keeps_is_not_loaded_twice() -> None:
    """It would end the scheduler."""
    async with served_sglang(limits=TWO, serve=True) as server:
        ranks = Ranks(server, "p", "a")
        ranks.stuck.add("a")
        assert (await server.stub.LoadLoRAAdapter(load("b"))).success
        history = await server.generate(request("r", lora_id="a"))
        assert history.code is CODE.FAILED_PRECONDITION
        assert "unload it first" in history.details
        ranks.stuck.clear()
        unload = pb.UnloadLoRAAdapterRequest(lora_name="first", lora_id="a")
        assert (await server.stub.UnloadLoRAAdapter(unload)).success
        assert ranks.loaded == {"p", "b"}
        await server.idle()
