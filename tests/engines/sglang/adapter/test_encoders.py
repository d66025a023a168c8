"""Media by reference: encoders are asked in time, and what goes wrong there ends in a status."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from sglang.srt.disaggregation.encoder import receiver as sglang_receiver
from sglang.srt.managers import io_struct as io
from smg_grpc_proto.generated import sglang_scheduler_pb2 as pb

from smg_grpc_servicer.core.errors import ConfigError, Unavailable
from smg_grpc_servicer.sglang import encoders as sglang_encoders
from smg_grpc_servicer.sglang.encoders import TO_THIS_PROCESS, Encoders
from smg_grpc_servicer.sglang.limits import Limits
from tests.support.sglang_served import ServedSglang, pixels, request, served_sglang
from tests.support.sglang_stub import Row, batch, stop
from tests.support.wait import until

CODE = grpc.StatusCode
LIMITS = Limits(max_prompt_tokens=100, media=True, language_only=True)
IMAGES = {"image_urls": ["http://a/1.png", "http://a/2.png"]}


class Receiver:
    """In the place of SGLang's."""

    def __init__(self, made: Any = None, *, encoders: int = 1) -> None:
        self.asked: list[Any] = []
        self.sent: list[threading.Event] = []
        self.failed: list[Callable[[Any], None]] = []
        self.slow: asyncio.Event | None = None
        """Until it is set nothing comes here."""
        self.left = 0
        self._made = made
        self._encoders = encoders

    def send_encode_request(
        self, obj: Any, time_stats_json: Any = None, on_dispatch_error: Any = None
    ) -> threading.Event | None:
        self.asked.append(obj)
        if not self._encoders:
            return None
        obj.num_items_assigned, obj.encoder_urls = {"image": [2]}, ["http://e"]
        self.failed.append(on_dispatch_error)
        self.sent.append(threading.Event())
        return self.sent[-1]

    async def recv_mm_data(
        self, request_obj: Any, mm_processor: Any, prompt: Any, need_wait_for_mm_inputs: bool = True
    ) -> Any:
        self.asked.append(request_obj)
        try:
            if self.slow is not None:
                await self.slow.wait()
        except asyncio.CancelledError:
            self.left += 1
            raise
        return self._made


def encoders(receiver: Receiver, backend: str = "zmq_to_scheduler") -> Encoders:
    return Encoders(receiver, backend, None)


async def finished(server: ServedSglang, sent: Any) -> None:
    await server.scheduler.say(batch(Row(sent.rid, [9], stop(), completion_tokens=1)))


async def test_the_scheduler_is_told_what_to_wait_for_and_then_the_encoder() -> None:
    """Each choice is encoded for itself: the scheduler waits for media by the choice's id."""
    receiver = Receiver()
    async with served_sglang(limits=LIMITS, encoders=encoders(receiver)) as server:
        call = server.stub.Generate(request(mm_inputs=IMAGES, params={"n": 2}))
        sent = await server.sent(2)
        for message, asked in zip(sent, receiver.asked, strict=True):
            assert message.need_wait_for_mm_inputs
            assert message.encoder_urls == ["http://e"]
            assert message.num_items_assigned == {"image": [2]}
            assert (asked.rid, asked.image_data) == (message.rid, IMAGES["image_urls"])
            assert (asked.video_data, asked.audio_data) == (None, None)
        assert all(event.is_set() for event in receiver.sent)
        call.cancel()
        await server.idle()


async def test_without_any_encoder_nothing_is_sent() -> None:
    async with served_sglang(limits=LIMITS, encoders=encoders(Receiver(encoders=0))) as server:
        history = await server.generate(request(mm_inputs=IMAGES))
        assert history.code is CODE.UNAVAILABLE
        assert "no encoder" in history.details
        assert server.scheduler.received == []
        await server.idle()


async def test_an_encoder_that_fails_is_told_to_the_scheduler_while_it_waits() -> None:
    """The scheduler ends the request then; of one that is over it is not told."""
    receiver = Receiver()
    async with served_sglang(limits=LIMITS, encoders=encoders(receiver)) as server:
        call = server.stub.Generate(request(mm_inputs=IMAGES))
        (sent,) = await server.sent()
        word = io.EncoderDispatchErrorReq(rid=sent.rid, error_msg="gone", error_code=502)
        threading.Thread(target=receiver.failed[0], args=(word,)).start()
        told = (await server.sent(2))[1]
        assert (told.rid, told.error_msg) == (sent.rid, "gone")
        await server.scheduler.say_aside(
            io.AbortReq(
                rid=sent.rid,
                finished_reason={"type": "abort", "message": "gone", "status_code": 502},
            )
        )
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await call.read()
        assert ended.value.code() is CODE.UNAVAILABLE
        await server.idle()
        receiver.failed[0](word)
        later = request("later", mm_inputs=IMAGES, stream=False)
        running = asyncio.ensure_future(server.generate(later))
        await server.sent(3)
        last = server.scheduler.received[2]
        assert isinstance(last, io.TokenizedGenerateReqInput)
        await finished(server, last)
        assert (await running).code is CODE.OK


async def test_embeddings_that_come_here_go_along_with_the_request() -> None:
    made = SimpleNamespace(input_ids=[5, 6, 6, 6, 7])
    ours = encoders(Receiver(made), TO_THIS_PROCESS)
    async with served_sglang(limits=LIMITS, encoders=ours) as server:
        call = server.stub.Generate(request(mm_inputs=IMAGES))
        (sent,) = await server.sent()
        assert list(sent.input_ids) == made.input_ids
        assert sent.mm_inputs.input_ids == made.input_ids
        assert not sent.need_wait_for_mm_inputs
        call.cancel()


async def test_embeddings_that_never_come_end_the_request() -> None:
    ours = encoders(Receiver(None), TO_THIS_PROCESS)
    async with served_sglang(limits=LIMITS, encoders=ours) as server:
        history = await server.generate(request(mm_inputs=IMAGES))
        assert history.code is CODE.UNAVAILABLE
        assert server.scheduler.received == []
        await server.idle()


@pytest.mark.parametrize("how", ["abort", "cancel", "stop", "death"])
async def test_who_waits_for_an_encoder_can_be_ended(how: str) -> None:
    """It is as slow as it likes: aborted, cut or left, the request is over, here and there."""
    receiver = Receiver()
    receiver.slow = asyncio.Event()
    ours = encoders(receiver, TO_THIS_PROCESS)
    async with served_sglang(limits=LIMITS, encoders=ours) as server:
        call = server.stub.Generate(request(mm_inputs=IMAGES, stream=False))
        await until(lambda: len(receiver.asked) == 1)
        if how == "abort":
            await server.stub.Abort(pb.AbortRequest(request_id="r"))
            assert (await call.read()).complete.finish_reason == "abort"
        elif how == "cancel":
            call.cancel()
        else:
            reason = Unavailable("over")
            server.servicer.table.cut_all(reason) if how == "stop" else server.engine.died("gone")
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await call.read()
            assert ended.value.code() is CODE.UNAVAILABLE
        await server.idle()
        assert receiver.left == 1
        assert server.scheduler.received == []


async def test_encoders_that_hang_have_so_many_threads_and_no_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang's receiver keeps the thread of a request whose client has gone, half an hour long."""
    monkeypatch.setattr(sglang_encoders, "MOST", 1)
    receiver = Receiver()
    ours = encoders(receiver)

    async def hangs(req_id: str) -> None:
        await asyncio.Event().wait()

    async with served_sglang(limits=LIMITS, encoders=ours) as server:
        call = server.stub.Generate(request("first", mm_inputs=IMAGES))
        (sent,) = await server.sent()
        call.cancel()
        refused = await server.generate(request("second", mm_inputs=IMAGES))
        assert refused.code is CODE.RESOURCE_EXHAUSTED
        with pytest.raises(TimeoutError, match="no encoder"):
            await ours.watched(hangs, 0.01)(req_id=sent.rid)
        call = server.stub.Generate(request("third", mm_inputs=IMAGES))
        await until(lambda: len(receiver.asked) == 2)
        call.cancel()
        await server.idle()


@pytest.mark.parametrize("more", [pixels(), {"image_data": [b"png"]}])
async def test_the_same_media_in_two_forms_are_refused(more: dict[str, Any]) -> None:
    async with served_sglang(limits=LIMITS, encoders=encoders(Receiver())) as server:
        history = await server.generate(request(mm_inputs={**more, **IMAGES}))
        assert history.code is CODE.INVALID_ARGUMENT
        assert history.details.startswith("mm_inputs: ")


@pytest.mark.parametrize("kind", ["MMReceiverHTTP", "MMReceiverGrpc"])
@pytest.mark.parametrize("backend", ["zmq_to_scheduler", TO_THIS_PROCESS])
def test_encoders_that_sglang_s_receiver_cannot_reach_are_refused_at_the_start(
    kind: str, backend: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SGLang 0.5.23 would end each request of theirs with a TypeError."""
    receiver = object.__new__(getattr(sglang_receiver, kind))
    closed: list[bool] = []
    registry = SimpleNamespace(close=lambda: closed.append(True))
    monkeypatch.setattr(sglang_receiver, "EncoderBootstrapServer", lambda **_: registry)
    monkeypatch.setattr(sglang_receiver, "create_mm_receiver", lambda *_, **__: receiver)
    config = SimpleNamespace(
        language_only=True,
        encoder_urls=[],
        host="127.0.0.1",
        encoder_bootstrap_port=1,
        encoder_transfer_backend=backend,
    )
    model = SimpleNamespace(dtype=None, hf_config=None)
    if (kind, backend) == ("MMReceiverGrpc", "zmq_to_scheduler"):
        with pytest.raises(ConfigError, match="--encoder-transfer-backend"):
            Encoders.of(None, config, model, None)
        return
    made = Encoders.of(None, config, model, None)
    assert made is not None
    made.close()
    assert closed == [True]
