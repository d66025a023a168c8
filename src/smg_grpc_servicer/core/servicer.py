"""The RPC bodies, once for all engines: Generate, Embed and Abort here, the rest in `control`.

A request is **admitted**, **converted** to core terms, handed to the engine and **streamed** back,
**wrapped** in the engine's proto, and **finished** on one exit path: a handler awaits its stream's
end (`writer`) instead of yielding, so a cancellation always arrives at an `await` of its own and
`finally` tells the engine exactly once.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from time import monotonic, time
from typing import Any, TypeVar

import grpc

from smg_grpc_servicer.core import failpoints
from smg_grpc_servicer.core.control import ControlBodies
from smg_grpc_servicer.core.engine import Engine
from smg_grpc_servicer.core.errors import Aborted, EngineDead, Exhausted, InvalidArgument
from smg_grpc_servicer.core.handlers import last_from
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.mailbox import Mailbox
from smg_grpc_servicer.core.messages import MAX_MESSAGE_BYTES, fits, pieces
from smg_grpc_servicer.core.metrics import Metrics, NullMetrics
from smg_grpc_servicer.core.pace import LONGEST
from smg_grpc_servicer.core.record import RequestRecord
from smg_grpc_servicer.core.requests import Phase, RequestTable, Ticket
from smg_grpc_servicer.core.status import code, refuse
from smg_grpc_servicer.core.texts import MAX_TRUNCATED
from smg_grpc_servicer.core.tokenizer import TokenizerSource
from smg_grpc_servicer.core.tracing import Spans, trace_context
from smg_grpc_servicer.core.types import Delta, Feature, Finish, GenerateSpec
from smg_grpc_servicer.core.validate import checked_prompt, truncated, validate
from smg_grpc_servicer.core.wire import Choice, Message
from smg_grpc_servicer.core.writer import Write, Writer, idle

log = logging.getLogger(__name__)

Context = grpc.aio.ServicerContext[Any, Any]

_NOTHING = nullcontext()
_T = TypeVar("_T")


class CoreServicer(ControlBodies):
    """All RPCs of the four protos over an `Engine`; a wing adds its generated base and its wire."""

    def __init__(
        self,
        engine: Engine,
        board: StatusBoard,
        *,
        table: RequestTable | None = None,
        metrics: Metrics | None = None,
        spans: Spans | None = None,
        max_chunk_tokens: int | None = None,
        coalesce_seconds: float = LONGEST,
    ) -> None:
        self.engine = engine
        self.board = board
        self.table = table or RequestTable(coalesce_seconds)
        board.progress = self.table
        self.metrics = metrics or NullMetrics()
        self.metrics.details = self.details
        self.spans = spans or Spans()
        self.max_chunk_tokens = max_chunk_tokens
        """Most token ids in one chunk; None sends whatever has piled up."""
        self.tokenizer = TokenizerSource(engine.tokenizer_path, engine.tokenizer_revision)
        self.started_at = time()
        self.last_receive_at: float | None = None
        engine.on_death = self.engine_died

    def engine_died(self, reason: str) -> None:
        """Readiness and liveness go down first, then every open stream ends UNAVAILABLE."""
        self.board.dead(reason)
        self.table.fail_all(EngineDead(f"the engine is gone: {reason}"))

    # Generate.

    @last_from("answer")
    async def Generate(self, request: Message, context: Context) -> None:
        """Serve one request; every stream ends with exactly one status."""
        write = failpoints.writing(context.write)
        last = await self._serve(request, context, write)
        self.board.unsent += 1
        try:
            await write(last)
        finally:
            self.board.request_sent()

    async def answer(self, request: Message, context: Context) -> bytes:
        """`Generate` for a server that sends the last message with the status; see `handlers`."""

        def write(message: Message) -> Awaitable[None]:
            return context.write(message.SerializeToString())

        last = await self._serve(request, context, failpoints.writing(write))
        task = asyncio.current_task()
        assert task is not None
        self.board.unsent += 1
        task.add_done_callback(self.board.request_sent)  # a context's would hold on to the call
        if failpoints.active:
            await failpoints.hit("before_complete")
        data: bytes = last.SerializeToString()
        return data

    async def _serve(self, request: Message, context: Context, write: Write) -> Message:
        """All of a request but its last message, which is returned."""
        record = RequestRecord(self.metrics)
        try:
            with self._around(request):
                self.board.require_accepting()
                self.last_receive_at = time()
                spec = self._convert(request, context)
                ticket = self._admit(spec.request_id, spec.sampling.n, stream=spec.stream)
                try:
                    with self.spans.request(
                        "Generate", spec.trace, {"request_id": spec.request_id}
                    ):
                        last = await self._run(spec, ticket, record, write)
                finally:
                    self._leave(ticket, spec, record)
        except grpc.aio.AbortError:
            raise
        except Exception as error:
            known = self.engine.translate(error)
            record.end(status=code(known).name)
            await refuse(context, known)
        except BaseException:
            record.end(status="CANCELLED")
            raise
        record.end(status="OK")
        return last

    async def _run(
        self, spec: GenerateSpec, ticket: Ticket, record: RequestRecord, write: Write
    ) -> Message:
        """What happens between a request's admission and its one exit."""
        if failpoints.active:
            await failpoints.hit("admitted")
        mailbox = ticket.mailbox
        if spec.text is not None:
            await self._tokenize(spec, spec.text, mailbox)
        await self._submit(spec, ticket)
        writer = Writer(self._write(spec, mailbox, record, write))
        mailbox.listen(writer.wake)
        try:
            return await writer.last
        finally:
            writer.close()

    async def _write(
        self, spec: GenerateSpec, mailbox: Mailbox, record: RequestRecord, write: Write
    ) -> Message:
        """The stream of a request; runs in a `Writer`."""
        choices = [
            Choice(index, prompt_tokens=len(spec.prompt), stream=spec.stream)
            for index in range(spec.sampling.n)
        ]
        while True:
            delta = mailbox.take()
            if delta is None:
                mailbox.check()
                await idle()
                continue
            choice = choices[delta.index]
            record.tokens(len(delta.token_ids))
            for message in self._chunks(spec, choice, delta):
                await write(message)
            if delta.finish is not None:
                record.finished(choice, delta.finish.reason)
                complete = self._complete(spec, choice, delta.finish)
                if mailbox.over:
                    return complete
                await write(complete)

    def _around(self, request: Message) -> AbstractContextManager[object]:
        """What a wing has to know of a request from its arrival to its end, refused or not."""
        return _NOTHING

    def _leave(self, ticket: Ticket, spec: GenerateSpec, record: RequestRecord) -> None:
        """The one exit of an admitted request."""
        if ticket.leaving():
            self.engine.abort(ticket.request_id)
        self._release(ticket)
        if log.isEnabledFor(logging.DEBUG):
            story = {
                "request_id": ticket.request_id,
                "prompt_tokens": record.prompt or len(spec.prompt),
                "output_tokens": record.generated,
                "finish_reason": record.finish_reason or "unfinished",
                "ms": round((monotonic() - ticket.admitted_at) * 1000, 1),
            }
            log.debug("request %s", " ".join(f"{k}={v}" for k, v in story.items()), extra=story)

    def _admit(self, request_id: str, choices: int, *, stream: bool) -> Ticket:
        return self.table.admit(request_id, choices, stream=stream)

    def _release(self, ticket: Ticket) -> None:
        self.table.release(ticket)
        self.board.request_left()

    def _owe(self, ticket: Ticket) -> None:
        """The engine gets the request: from now on its silence is watched."""
        ticket.mailbox.owe()
        self.board.request_arrived()

    def _convert(self, request: Message, context: Context) -> GenerateSpec:
        """Proto to core, and everything that can be refused before the engine hears of it."""
        spec = self.wire.generate_spec(request)
        self._require_features(spec.needs)
        facts = self.engine.model_facts()
        validate(spec, facts, self.wire.path, min_output=self.engine.min_output_tokens)
        if spec.text is None and not spec.input_embeds:
            self._fill_prompt(spec, spec.prompt, "prompt")
        trace = trace_context(context.invocation_metadata())
        if trace:
            spec.trace = trace
        return spec

    def _fill_prompt(self, spec: GenerateSpec, ids: Sequence[int], name: str) -> None:
        """Check the prompt's ids and put them in; `name` is what the caller sent them as."""
        facts, floor = self.engine.model_facts(), self.engine.min_output_tokens
        ids = truncated(ids, spec.truncate_prompt, facts, min_output=floor)
        spec.prompt = checked_prompt(ids, facts, self.wire.path(name), min_output=floor)

    async def _tokenize(self, spec: GenerateSpec, text: str, mailbox: Mailbox) -> None:
        """Put a text prompt's ids in, made off the loop by the engine's own tokenizer.

        An abort or a cut that comes meanwhile does not wait for the tokenizer.
        """
        longest = await self.engine.max_text_length()
        if longest is not None and spec.truncate_prompt is not None:
            longest = max(longest, MAX_TRUNCATED)
        if longest is not None and len(text) > longest:
            why = (
                "that can fit into the model's context"
                if spec.truncate_prompt is None
                else "that is tokenized to be truncated"
            )
            raise InvalidArgument(
                self.wire.path("text"),
                f"{len(text)} characters are more than {longest}, the most {why}",
            )
        ids = await _unless_ended(self.engine.tokenize(text), mailbox)
        if ids is not None:
            self._fill_prompt(spec, ids, "text")

    async def _submit(self, spec: GenerateSpec, ticket: Ticket) -> None:
        """Hand the request to the engine, unless it was aborted or cut while it was prepared."""
        if failpoints.active:
            await failpoints.hit("before_submit")
        if ticket.mailbox.ended:
            return
        ticket.phase = Phase.SUBMITTING
        self._owe(ticket)
        try:
            submitting = self.engine.submit(spec, ticket.mailbox)
            if self.engine.waits_with(spec):
                await _unless_ended(submitting, ticket.mailbox)
            else:
                await submitting
        except Exception:
            ticket.phase = Phase.OVER
            raise
        ticket.phase = Phase.RUNNING
        if failpoints.active:
            await failpoints.hit("after_submit")

    def _chunks(self, spec: GenerateSpec, choice: Choice, delta: Delta) -> Iterable[Message]:
        """The chunks of a delta: none when the answer is sent whole, several when it is large."""
        if not spec.stream:
            choice.add(delta)
            return ()
        if fits(delta, self.max_chunk_tokens):  # nearly always; a generator would be for nothing
            choice.add(delta)
            worth = delta.token_ids or delta.prompt_logprobs
            return (self.wire.chunk(spec, choice, delta),) if worth else ()
        return self._pieces(spec, choice, delta)

    def _pieces(self, spec: GenerateSpec, choice: Choice, delta: Delta) -> Iterator[Message]:
        for piece in pieces(delta, max_tokens=self.max_chunk_tokens):
            choice.add(piece)
            if piece.token_ids or piece.prompt_logprobs is not None:
                yield self.wire.chunk(spec, choice, piece)

    def _complete(self, spec: GenerateSpec, choice: Choice, finish: Finish) -> Message:
        message = self.wire.complete(spec, choice, finish)
        size = message.ByteSize()
        if size > MAX_MESSAGE_BYTES:
            raise Exhausted(
                f"the answer of choice {choice.index} takes {size} bytes in one message, more than "
                f"{MAX_MESSAGE_BYTES}: ask for fewer logprobs or output tokens, or stream it"
            )
        return message

    # Embed.

    async def Embed(self, request: Message, context: Context) -> Message:
        async def body() -> Message:
            self.board.require_accepting()
            self._require_features(frozenset({Feature.EMBED}))
            spec = self.wire.embed_spec(request)
            self._require_features(spec.needs)
            facts = self.engine.model_facts()
            ids = checked_prompt(spec.prompt, facts, self.wire.path("prompt"), min_output=0)
            spec = replace(spec, prompt=ids, trace=trace_context(context.invocation_metadata()))
            ticket = self._admit(spec.request_id, 1, stream=False)
            self._owe(ticket)
            try:
                found = await _unless_ended(self.engine.embed(spec), ticket.mailbox)
                if found is None:
                    await ticket.mailbox.wait()  # raises what it was cut with
                    raise Aborted("the request was aborted")
                return self.wire.embed_response(found)
            finally:
                self._release(ticket)

        return await self._unary(context, body)

    # Abort.

    async def Abort(self, request: Message, context: Context) -> Message:
        """End the named requests; an id that is not here is fine, so that it can be repeated."""

        async def body() -> Message:
            return self.wire.abort_response(self.abort(self.wire.abort_ids(request)))

        return await self._unary(context, body)

    def abort(self, request_ids: Sequence[str]) -> list[str]:
        """The ids that were in flight; each stream ends with `finish_reason="abort"` at once."""
        found = []
        for request_id in request_ids:
            ticket = self.table.abort(request_id)
            if ticket is None:
                continue
            found.append(request_id)
            if ticket.must_abort():
                self.engine.abort(request_id)
        return found

    def statistics(self) -> dict[str, int]:
        """What is held for requests right now: all zero when there are none."""
        return self.table.statistics()

    def details(self) -> dict[str, int]:
        """For the metrics endpoint: `statistics` and what the engine counts."""
        own = {name: value for name, value in self.statistics().items() if name != "in_flight"}
        return own | {f"engine_{name}": value for name, value in self.engine.counters().items()}


async def _unless_ended(work: Awaitable[_T], mailbox: Mailbox) -> _T | None:
    """What `work` gives; None, at once, when the request was aborted or cut before."""
    working = asyncio.ensure_future(work)
    ended = asyncio.ensure_future(mailbox.wait())
    try:
        await asyncio.wait({working, ended}, return_when=asyncio.FIRST_COMPLETED)
        return None if mailbox.ended else working.result()
    finally:
        working.cancel()
        ended.cancel()
        await asyncio.gather(working, ended, return_exceptions=True)
