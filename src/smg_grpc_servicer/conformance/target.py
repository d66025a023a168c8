"""The server under test as the checks see it: requests in its dialect, streams, facts.

Every request gets an id that no other run uses. Whatever a check leaves open, `tidy` ends.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from time import monotonic
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from smg_grpc_servicer.conformance.connect import Connection
from smg_grpc_servicer.conformance.registry import Failed, NotApplicable, expect
from smg_grpc_servicer.conformance.stream import Stream
from smg_grpc_servicer.testing.dialects import Dialect
from smg_grpc_servicer.testing.history import History, check

PAUSE = 0.01
"""Seconds between two questions to a server that cannot tell by itself."""

LONG = 4000
"""Most tokens of a stream that is meant to be cut short."""

SLOWEST = 20.0
"""Tokens per second assumed of a server that has not shown its rate."""


@dataclass(frozen=True, slots=True)
class Facts:
    """What GetModelInfo said, or the command line; None and empty mean unknown."""

    vocab_size: int | None = None
    context: int | None = None
    eos: tuple[int, ...] = ()


class Target:
    """See the module."""

    def __init__(
        self,
        connection: Connection,
        dialect: Dialect,
        facts: Facts,
        *,
        prompt: Sequence[int] = (5, 6, 7),
        timeout: float = 20.0,
        shutdown_pid: int | None = None,
    ) -> None:
        self.connection = connection
        self.channel = connection.open()
        self.dialect = dialect
        self.facts = facts
        self.prompt = list(prompt)
        self.timeout = timeout
        self.shutdown_pid = shutdown_pid
        self.rate: float | None = None
        """Tokens per second of one stream, once measured."""
        self._run = uuid.uuid4().hex[:8]
        self._count = 0
        self._streams: set[Stream] = set()

    @property
    def stub(self) -> Any:
        return self.dialect.stub(self.channel)

    @property
    def health(self) -> Any:
        return health_pb2_grpc.HealthStub(self.channel)

    @property
    def vocab_size(self) -> int:
        """:raises NotApplicable: nobody said."""
        if not self.facts.vocab_size:
            raise NotApplicable("the vocabulary's size is unknown; give --vocab-size")
        return self.facts.vocab_size

    @property
    def long(self) -> int:
        """Output tokens for a stream that should not end before the check is done with it."""
        if not self.facts.context:
            return LONG
        return max(1, min(LONG, self.facts.context - len(self.prompt) - 1))

    def tokens_for(self, seconds: float, most: int) -> int:
        """How many tokens a stream makes in `seconds`, between 8 and `most`."""
        wanted = int((self.rate or SLOWEST) * seconds)
        return max(8, min(most, wanted, self.long))

    def new_id(self, tag: str = "r") -> str:
        self._count += 1
        return f"conformance-{self._run}-{tag}-{self._count}"

    # Requests.

    def request(self, request_id: str | None = None, **options: Any) -> Any:
        """A GenerateRequest: greedy, past EOS, 8 tokens, unless told otherwise.

        :raises Unsayable: the proto has no such field.
        """
        prompt = options.pop("prompt", self.prompt)
        options = {"max_tokens": 8, "ignore_eos": True, **options}
        return self.dialect.generate(
            self.new_id() if request_id is None else request_id, prompt, **options
        )

    def send(
        self,
        request: Any,
        *,
        timeout: float | None = None,
        channel: grpc.aio.Channel | None = None,
        pause: Callable[[int], float] | None = None,
    ) -> Stream:
        """Start a Generate and read it in the background."""
        stub = self.stub if channel is None else self.dialect.stub(channel)
        call = stub.Generate(
            request, timeout=timeout or self.timeout, metadata=self.connection.metadata
        )
        stream = Stream(request, call, pause=pause)
        self._streams.add(stream)
        return stream

    async def ask(self, request: Any, **options: Any) -> History:
        """Send a request and read it to its end, whatever that is."""
        return await self.send(request, **options).end()

    async def generate(
        self, request_id: str | None = None, *, choices: int = 1, **options: Any
    ) -> History:
        """An answer that must come, with a complete for each choice."""
        return answered(await self.ask(self.request(request_id, **options)), choices)

    async def abort(self, *request_ids: str) -> Any:
        if len(request_ids) == 1:
            request = self.dialect.abort(request_ids[0])
        elif self.dialect.abort_takes_list:
            request = self.dialect.pb.AbortRequest(request_ids=request_ids)
        else:
            raise NotApplicable("the proto's Abort takes one id")
        return await self.call(self.stub.Abort, request)

    async def call(self, method: Any, request: Any, timeout: float | None = None) -> Any:
        """A unary call. :raises grpc.aio.AioRpcError: its status."""
        return await method(
            request, timeout=timeout or self.timeout, metadata=self.connection.metadata
        )

    async def management(self, name: str) -> Any:
        """HealthCheck, GetModelInfo, GetServerInfo, GetLoads with an empty request."""
        return await self.call(
            getattr(self.stub, name), getattr(self.dialect.pb, f"{name}Request")()
        )

    async def health_status(self, service: str) -> int:
        """`grpc.health.v1` Check."""
        answer = await self.call(self.health.Check, health_pb2.HealthCheckRequest(service=service))
        return int(answer.status)

    async def active(self) -> int:
        """Requests in flight as the server counts them."""
        return int((await self.management("GetServerInfo")).active_requests)

    # Around the checks.

    async def probe(self) -> str | None:
        """Whether it still serves: None, or what happened instead."""
        request, start = self.request(max_tokens=8, stream=True), monotonic()
        history = await self.ask(request)
        if history.code is not grpc.StatusCode.OK:
            return f"{status(history)}"
        if not history.completes:
            return "the stream of a plain request ended OK without a complete"
        # The first one may compile or warm up; the best is nearest to what the server can do.
        self.rate = max(self.rate or 0.0, 8 / max(1e-4, monotonic() - start))
        return None

    async def tidy(self) -> None:
        """End what a check left open. Abort as well: some servers go on after a cancel."""
        streams, self._streams = self._streams, set()
        for stream in streams:
            if await stream.close() and stream.request.request_id:
                try:
                    await self.abort(stream.request.request_id)
                except grpc.RpcError:
                    continue  # The check that follows will find out what is wrong.

    async def close(self) -> None:
        await self.tidy()
        await self.channel.close()


def status(history: History) -> str:
    """The end of a stream in words."""
    name = history.code.name if history.code is not None else "no status"
    return f"{name} {history.details!r}" if history.details else name


def served(history: History) -> History:
    """:raises NotApplicable: UNIMPLEMENTED, with the server's wording. :raises Failed: not OK."""
    if history.code is grpc.StatusCode.UNIMPLEMENTED:
        raise NotApplicable(f"UNIMPLEMENTED: {history.details}")
    if history.code is not grpc.StatusCode.OK:
        raise Failed(f"ended {status(history)}")
    return history


def answered(history: History, choices: int = 1) -> History:
    """Served, each choice with its complete; a check's own promise is not judged here."""
    served(history)
    ended = {complete.index for complete in history.completes}
    expect(ended == set(range(choices)), f"OK with completes of choices {sorted(ended)} only")
    return history


def kept(history: History, *, logprobs: int | None = None) -> History:
    """Answered, and no promise of the history checker broken."""
    served(history)
    broken = check(history, logprobs=logprobs)
    expect(not broken, "; ".join(broken[:3]))
    return history


def output(history: History, index: int = 0) -> list[int]:
    """The ids of a choice as the gateway takes them: from the chunks of a stream, else whole."""
    if history.stream:
        return history.streamed_ids(index)
    return list(history.complete(index).output_ids)


async def becomes(true: Callable[[], Awaitable[bool]], seconds: float) -> bool:
    """Ask until it is true or the time is over; there is nothing to wait on from outside."""
    end = monotonic() + seconds
    while not await true():
        if monotonic() >= end:
            return False
        await asyncio.sleep(PAUSE)
    return True
