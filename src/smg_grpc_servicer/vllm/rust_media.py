"""Media on the Rust path by Python's processors: the object the Rust server hands requests to.

The server calls `submit` on a thread of its own with what a request refers to, and is answered
once, by `done(kind, result)`: `ok` with the prompt as the engine has it and the encoded features,
or `invalid`, `unavailable`, `internal` with words. The work is done on the event loop by a
`Processor` (`inprocess`, `redis`). Frames go out as views of the processor's own memory, never as
copies: the server reads them until it has sent them. At most `max_inflight` requests are worked on
and as many wait; more are refused at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import grpc

from smg_grpc_servicer.core.errors import Exhausted, Internal, Unavailable
from smg_grpc_servicer.core.status import code, details

if TYPE_CHECKING:
    from numpy import uint8
    from numpy.typing import NDArray

log = logging.getLogger(__name__)

_KINDS = {
    grpc.StatusCode.INVALID_ARGUMENT: "invalid",
    grpc.StatusCode.UNAVAILABLE: "unavailable",
    grpc.StatusCode.RESOURCE_EXHAUSTED: "unavailable",
    grpc.StatusCode.DEADLINE_EXCEEDED: "unavailable",
}
"""What there is a word for; everything else is `internal`."""

STOPPING = Unavailable("the server is stopping")


@dataclass(frozen=True, slots=True)
class MediaJob:
    """One request's media, unprocessed."""

    request_id: str
    prompt_ids: Sequence[int]
    """With one anchor for each item."""
    prompt_text: str | None
    items: Sequence[tuple[str, str]]
    """Modality (`image`, `video`, `audio`) and URL, in the order of the anchors."""
    arrival_time: float
    """Seconds since the epoch."""
    want_identity: bool
    """A prefill: the decode will need the identity of what was processed."""


@dataclass(frozen=True, slots=True)
class MediaResult:
    """The same, processed."""

    prompt_ids: Sequence[int]
    """Placeholders expanded."""
    features: bytes | None = None
    """`mm_features` as vLLM's own encoder writes them."""
    frames: Sequence[Any] = ()
    """Buffers that `features` refers to: contiguous, and unchanged from here on."""
    cache_salt: str | None = None
    identity: bytes | None = None


class Processor(Protocol):
    """Who fetches and processes. Its methods run on the event loop."""

    name: str
    """`inprocess` or `redis`, as the gateway is told."""

    async def schemes(self) -> tuple[str, ...]:
        """URL schemes it takes now; empty while it does not serve."""

    async def process(self, job: MediaJob) -> MediaResult:
        """:raises ServicerError: `InvalidArgument` for the caller's fault."""


Done = Callable[..., None]


class MediaBridge:
    """What the binding takes as `media_processor`; made on the event loop."""

    def __init__(self, processor: Processor, *, source: str, max_inflight: int) -> None:
        self.name = processor.name
        self.source = source
        self.max_inflight = max_inflight
        self._processor = processor
        self._loop = asyncio.get_running_loop()
        self._slots = asyncio.Semaphore(max_inflight)
        self._tasks: set[asyncio.Task[None]] = set()
        self._schemes: tuple[str, ...] = ()
        self._closed = False
        self._lock = threading.Lock()
        self._jobs = 0
        self._refused = 0

    @property
    def schemes(self) -> str:
        """Those of the last look, separated by commas."""
        return ",".join(self._schemes)

    def probe(self, done: Done) -> None:
        """Look whether it serves, and with which schemes: `done(serving, schemes)`."""
        self._begin(self._look, _Once(done, (False, "")))

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        prompt_text: str | None,
        items: Sequence[tuple[str, str]],
        arrival_time: float,
        want_identity: bool,
        done: Done,
    ) -> None:
        """Process a request's media and answer `done`; from any thread, returns at once."""
        with self._lock:
            full = self._jobs >= 2 * self.max_inflight
            self._jobs += not full
            self._refused += full
        if full:
            busy = Exhausted(f"{self.max_inflight} requests are having their media processed")
            _Once(done, _failure(busy)).give_up()
            return
        job = MediaJob(
            request_id, prompt_token_ids, prompt_text, items, arrival_time, want_identity
        )
        once = _Once(done, _failure(STOPPING), after=self._ended)
        self._begin(lambda once: self._work(job, once), once)

    async def close(self) -> None:
        """Cancel what runs and answer everybody; whatever comes later is answered at once."""
        self._closed = True
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "media_jobs": self._jobs,
                "media_tasks": len(self._tasks),
                "media_refused": self._refused,
            }

    def _begin(self, work: Callable[[_Once], Coroutine[Any, Any, None]], once: _Once) -> None:
        try:
            self._loop.call_soon_threadsafe(self._start, work, once)
        except RuntimeError:  # the loop is closed
            once.give_up()

    def _start(self, work: Callable[[_Once], Coroutine[Any, Any, None]], once: _Once) -> None:
        if self._closed:
            once.give_up()
            return
        task = self._loop.create_task(work(once))
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            # It was cancelled, perhaps before its first step.
            once.give_up()

        task.add_done_callback(ended)

    def _ended(self) -> None:
        with self._lock:
            self._jobs -= 1

    async def _look(self, once: _Once) -> None:
        try:
            self._schemes = await self._processor.schemes()
        except Exception as error:
            log.warning("media are not served now: %s", details(error))
            self._schemes = ()
        once(bool(self._schemes), self.schemes)

    async def _work(self, job: MediaJob, once: _Once) -> None:
        try:
            async with self._slots:
                result = await self._processor.process(job)
            answer = ("ok", _answer(result))
        except Exception as error:
            if code(error) not in _KINDS:
                log.exception("media of request %s", job.request_id)
            answer = _failure(error)
        once(*answer)


class _Once:
    """Calls `done` the first time and never again; `otherwise` is for who never came to call it."""

    def __init__(
        self,
        done: Done,
        otherwise: tuple[Any, ...],
        *,
        after: Callable[[], None] = lambda: None,
    ) -> None:
        self._done: Done | None = done
        self._otherwise = otherwise
        self._after = after
        self._lock = threading.Lock()

    def __call__(self, *answer: Any) -> None:
        with self._lock:
            done, self._done = self._done, None
        if done is None:
            return
        try:
            done(*answer)
        except Exception:
            log.exception("the server did not take an answer about media")
        finally:
            self._after()

    def give_up(self) -> None:
        self(*self._otherwise)


def _failure(error: Exception) -> tuple[str, Any]:
    return _KINDS.get(code(error), "internal"), details(error)


def _answer(result: MediaResult) -> tuple[Any, ...]:
    return (
        list(result.prompt_ids),
        result.features,
        [frame(each) for each in result.frames],
        result.cache_salt,
        result.identity,
    )


def frame(buffer: Any) -> NDArray[uint8]:
    """A read-only view of a buffer's bytes, as the server borrows them.

    :raises Internal: they do not lie in one piece, so a view would be a copy.
    """
    import numpy as np

    view = memoryview(buffer)
    if not view.c_contiguous:
        raise Internal("a media frame is not contiguous in memory")
    array: NDArray[uint8] = np.frombuffer(view, dtype=np.uint8)
    array.flags.writeable = False
    return array
