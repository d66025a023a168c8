"""The media bridge: answered once, whatever happens, and without copies."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from smg_grpc_servicer.core.errors import InvalidArgument, Unavailable
from smg_grpc_servicer.vllm.rust_media import MediaBridge, MediaJob, MediaResult, frame
from tests.support.wait import until

ITEMS = [("image", "data:image/png;base64,AAAA"), ("image", "https://example.com/a.png")]


class StubProcessor:
    """Answers with what it was given, once it may."""

    name = "inprocess"

    def __init__(self) -> None:
        self.jobs: list[MediaJob] = []
        self.may: asyncio.Event = asyncio.Event()
        self.error: Exception | None = None
        self.frames: Sequence[Any] = ()
        self.running = self.most = self.cancelled = 0
        self.now: tuple[str, ...] = ("http", "https", "data")

    async def schemes(self) -> tuple[str, ...]:
        if self.error is not None:
            raise self.error
        return self.now

    async def process(self, job: MediaJob) -> MediaResult:
        self.jobs.append(job)
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await self.may.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.error is not None:
            raise self.error
        return MediaResult((*job.prompt_ids, 9, 9), b"features", self.frames, "salt", b"identity")


class Answers:
    """Every call of one `done`, and from which thread."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self._loop = asyncio.get_running_loop()
        self._first = asyncio.Event()

    def __call__(self, *answer: Any) -> None:
        self.calls.append(answer)
        self._loop.call_soon_threadsafe(self._first.set)

    async def only(self) -> tuple[Any, ...]:
        await asyncio.wait_for(self._first.wait(), 5)
        await asyncio.sleep(0)
        assert len(self.calls) == 1
        return self.calls[0]


@pytest.fixture
def processor() -> StubProcessor:
    return StubProcessor()


@pytest.fixture
async def bridge(processor: StubProcessor) -> MediaBridge:
    return MediaBridge(processor, source="flag", max_inflight=2)


def submit(bridge: MediaBridge, name: str = "r", *, threaded: bool = True) -> Answers:
    """As the server does: from a thread that knows no loop."""
    answers = Answers()
    arguments = (name, [1, 2], "text", ITEMS, 1.5, True, answers)
    if threaded:
        thread = threading.Thread(target=bridge.submit, args=arguments)
        thread.start()
        thread.join()
    else:
        bridge.submit(*arguments)
    return answers


async def test_a_request_is_processed_on_the_loop_and_answered_once(
    bridge: MediaBridge, processor: StubProcessor
) -> None:
    processor.may.set()
    kind, result = await submit(bridge).only()
    assert kind == "ok"
    assert result == ([1, 2, 9, 9], b"features", [], "salt", b"identity")
    assert processor.jobs == [MediaJob("r", [1, 2], "text", ITEMS, 1.5, want_identity=True)]
    assert set(bridge.statistics().values()) == {0}


def test_what_the_server_reads_of_it() -> None:
    async def look() -> tuple[Any, ...]:
        bridge = MediaBridge(StubProcessor(), source="env", max_inflight=7)
        return bridge.name, bridge.source, bridge.max_inflight, bridge.schemes

    assert asyncio.run(look()) == ("inprocess", "env", 7, "")


async def test_a_probe_tells_whether_it_serves_and_what(
    bridge: MediaBridge, processor: StubProcessor
) -> None:
    answers = Answers()
    bridge.probe(answers)
    assert await answers.only() == (True, "http,https,data")
    assert bridge.schemes == "http,https,data"
    processor.now = ()
    answers = Answers()
    bridge.probe(answers)
    assert await answers.only() == (False, "")
    processor.error = Unavailable("no sidecar")
    answers = Answers()
    bridge.probe(answers)
    assert await answers.only() == (False, "")


@pytest.mark.parametrize(
    ("error", "answer"),
    [
        (InvalidArgument("media_refs", "no image"), ("invalid", "media_refs: no image")),
        (Unavailable("sidecar_timeout: r"), ("unavailable", "sidecar_timeout: r")),
        (asyncio.TimeoutError("slow"), ("unavailable", "TimeoutError: slow")),
        (ValueError("shapes"), ("internal", "ValueError: shapes")),
        (KeyError(), ("internal", "KeyError")),
    ],
)
async def test_failures_are_told_by_whose_fault_they_are(
    bridge: MediaBridge,
    processor: StubProcessor,
    error: Exception,
    answer: tuple[str, str],
) -> None:
    processor.may.set()
    processor.error = error
    assert await submit(bridge).only() == answer


async def test_frames_are_the_processors_own_memory_and_cannot_be_written(
    bridge: MediaBridge, processor: StubProcessor
) -> None:
    """The server borrows them: no copy is made of a picture's tensors."""
    pixels: Any = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    raw = bytearray(b"abc")
    processor.frames = (pixels, raw)
    processor.may.set()
    _, result = await submit(bridge).only()
    first, second = result[2]
    assert (first.dtype, first.shape, first.size) == (np.uint8, (96,), 96)
    assert np.shares_memory(first, pixels)
    for each in (first, second):
        assert each.flags.c_contiguous
        assert not each.flags.writeable
    raw[0] = 0x7A
    assert bytes(second) == b"zbc"


async def test_a_frame_in_pieces_is_refused_rather_than_copied(
    bridge: MediaBridge, processor: StubProcessor
) -> None:
    processor.frames = (np.zeros((4, 4))[:, ::2],)
    processor.may.set()
    assert await submit(bridge).only() == ("internal", "a media frame is not contiguous in memory")


def test_an_empty_frame_is_one() -> None:
    assert frame(b"").size == 0


async def test_so_many_run_as_many_wait_and_more_are_refused_at_once(
    bridge: MediaBridge, processor: StubProcessor
) -> None:
    """Two at a time: two more wait, the fifth is told to go elsewhere."""
    taken = [submit(bridge, f"r{at}") for at in range(4)]
    kind, words = await submit(bridge, "r4").only()
    assert kind == "unavailable"
    assert words == "2 requests are having their media processed"
    assert bridge.statistics()["media_jobs"] == 4
    processor.may.set()
    assert [(await each.only())[0] for each in taken] == ["ok"] * 4
    assert processor.most == 2
    assert bridge.statistics() == {"media_jobs": 0, "media_tasks": 0, "media_refused": 1}
    assert (await submit(bridge, "r5").only())[0] == "ok"


@pytest.mark.parametrize("threaded", [True, False])
async def test_closing_cancels_and_answers_everybody(
    bridge: MediaBridge, processor: StubProcessor, threaded: bool
) -> None:
    """Running, waiting, not yet begun and too late: each is answered once."""
    answers = [submit(bridge, f"r{at}", threaded=threaded) for at in range(3)]
    await until(lambda: processor.running == 2)
    answers.append(submit(bridge, "r3", threaded=threaded))
    await bridge.close()
    answers.append(submit(bridge, "r4", threaded=threaded))
    for each in answers:
        assert await each.only() == ("unavailable", "the server is stopping")
    assert processor.cancelled == 2
    assert set(bridge.statistics().values()) == {0}


def test_after_the_loop_it_still_answers() -> None:
    async def make() -> MediaBridge:
        return MediaBridge(StubProcessor(), source="flag", max_inflight=1)

    bridge = asyncio.run(make())
    calls: list[tuple[Any, ...]] = []
    bridge.submit("r", [1], None, ITEMS, 0.0, False, lambda *answer: calls.append(answer))
    bridge.probe(lambda *answer: calls.append(answer))
    assert calls == [("unavailable", "the server is stopping"), (False, "")]


async def test_a_server_that_does_not_take_an_answer_costs_no_slot(
    bridge: MediaBridge, processor: StubProcessor, caplog: pytest.LogCaptureFixture
) -> None:
    processor.may.set()
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()

    def done(*_: Any) -> None:
        loop.call_soon(ended.set)
        raise RuntimeError("gone")

    bridge.submit("r", [1], None, ITEMS, 0.0, False, done)
    await asyncio.wait_for(ended.wait(), 5)
    assert "did not take an answer" in caplog.text
    assert bridge.statistics()["media_jobs"] == 0
