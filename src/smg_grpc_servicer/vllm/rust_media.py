"""Media on the Rust path by Python's processors: the object the Rust server hands requests to.

The server calls `submit` on a thread of its own with what a request refers to, and is answered once,
by `done(kind, result)`: `ok` with the prompt as the engine has it and the encoded features, or
`invalid`, `unavailable`, `internal` with words. The work is done on the event loop by a `Processor`
(`inprocess`, `redis`). Frames go out as views of the processor's own memory, never as copies: the
server reads them until it has sent them. At most `max_inflight` requests are worked on and as many
wait; more are refused at once.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
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
        self._lock = threading.Lock()
        self._jobs: set[Future[None]] = set()
        self._probes: set[Future[None]] = set()
        self._schemes: tuple[str, ...] = ()
        self._refused = 0
        self._closed = False

    @property
    def schemes(self) -> str:
        """Those of the last look, separated by commas."""
        return ",".join(self._schemes)

    def probe(self, done: Done) -> None:
        """Look whether it serves, and with which schemes: `done(serving, schemes)`."""
        once = _Once(done, (False, ""))
        self._begin(self._look(once), once, self._probes)

    def submit(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        prompt_text: str | None,
        items: Sequence[tuple[str, str]],
        arrival_time: float,
        want_identity: bool,  # noqa: FBT001 - the binding's own order
        done: Done,
    ) -> None:
        """Process a request's media and answer `done`; from any thread, returns at once."""
        once = _Once(done, _failure(STOPPING))
        with self._lock:
            full = len(self._jobs) >= 2 * self.max_inflight
            self._refused += full
        if full:
            once(
                *_failure(
                    Exhausted(f"{self.max_inflight} requests are having their media processed")
                )
            )
            return
        job = MediaJob(
            request_id, prompt_token_ids, prompt_text, items, arrival_time, want_identity
        )
        self._begin(self._work(job, once), once, self._jobs)

    async def close(self) -> None:
        """Cancel what runs and answer everybody; whatever comes later is answered at once."""
        with self._lock:
            self._closed = True
            running = [*self._jobs, *self._probes]
        for each in running:
            each.cancel()
        await asyncio.gather(*map(asyncio.wrap_future, running), return_exceptions=True)

    def statistics(self) -> dict[str, int]:
        with self._lock:
            return {
                "media_jobs": len(self._jobs),
                "media_probes": len(self._probes),
                "media_refused": self._refused,
            }

    def _begin(self, work: Any, once: _Once, among: set[Future[None]]) -> None:
        with self._lock:
            try:
                if self._closed:
                    raise RuntimeError("closed")  # noqa: TRY301 - as a closed loop raises
                future = asyncio.run_coroutine_threadsafe(work, self._loop)
            except RuntimeError:
                work.close()
                future = None
            else:
                among.add(future)
        if future is None:
            once.give_up()
            return

        def ended(future: Future[None]) -> None:
            with self._lock:
                among.discard(future)
            # Cancelled before its first step, or by a loop that ends.
            once.give_up()

        future.add_done_callback(ended)

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

    def __init__(self, done: Done, otherwise: tuple[Any, ...]) -> None:
        self._done: Done | None = done
        self._otherwise = otherwise
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
