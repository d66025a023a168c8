"""Ending early: by the Abort RPC, by cancelling the call, by a deadline, by a lost connection.

A stream cannot be watched from outside once its client is gone. What can be seen is that its id is
free again and that the server's own count of active requests falls.
"""

from __future__ import annotations

import asyncio
from time import monotonic

import grpc

from smg_grpc_servicer.conformance.registry import Failed, check, expect
from smg_grpc_servicer.conformance.relay import relay
from smg_grpc_servicer.conformance.stream import Stream
from smg_grpc_servicer.conformance.target import PAUSE, Target, answered, becomes, output, status
from smg_grpc_servicer.testing.history import History

TRIES = 4
"""A fast engine may finish before an abort arrives; that proves nothing and is tried again."""

FREE_SECONDS = 5.0
"""How soon after its client left a request must be gone."""

STRAY_SECONDS = 1.0
"""Output this long after an abort was acknowledged is not a race any more."""


async def _running(target: Target, request_id: str, **options: int | bool) -> Stream:
    """A long stream that has had its first message."""
    stream = target.send(target.request(request_id, **{"max_tokens": target.long, **options}))
    if not await stream.first():
        raise Failed(f"the stream ended {status(await stream.end())} before its first message")
    return stream


async def _aborted(target: Target, stream: Stream, *request_ids: str) -> History:
    """Abort a stream and read the end that follows."""
    await target.abort(*(request_ids or (stream.request.request_id,)))
    acknowledged = monotonic()
    history = await stream.end()
    late = monotonic() - acknowledged
    reason = history.completes[-1].finish_reason if history.completes else None
    if reason != "abort":
        expect(
            late < STRAY_SECONDS, f"ended {late:.1f} s after the abort, finish_reason {reason!r}"
        )
    return history


async def _until_aborted(target: Target) -> History:
    """The history of a stream that an Abort RPC ended. :raises Failed: it ran on each time."""
    ended = []
    for _ in range(TRIES):
        history = await _aborted(target, await _running(target, target.new_id("abort")))
        answered(history)
        if history.complete().finish_reason == "abort":
            return history
        ended.append(f"{history.complete().finish_reason!r} after {len(output(history))} tokens")
    raise Failed(f"finish_reason {', '.join(ended)}")


async def _abort_until_over(target: Target, *, stream: bool) -> History:
    """Abort a request from the moment it is sent until it ends: nothing shows that it has begun."""
    for _ in range(TRIES):
        name = target.new_id("abort")
        running = target.send(target.request(name, max_tokens=target.long, stream=stream))
        while not running.ended:
            await target.abort(name)
            await asyncio.sleep(PAUSE)
        history = answered(await running.end())
        if history.complete().finish_reason == "abort":
            return history
    raise Failed(f"it ran to its own end {TRIES} times")


@check("abort-stream", "Abort ends a stream with a complete of reason abort, then OK")
async def abort_stream(target: Target) -> str:
    history = await _until_aborted(target)
    return f"after {history.complete().completion_tokens} tokens"


@check("abort-unary", "Abort ends a whole answer with a complete of reason abort")
async def abort_unary(target: Target) -> str:
    history = await _abort_until_over(target, stream=False)
    return f"after {history.complete().completion_tokens} tokens"


@check("abort-at-once", "an Abort sent right behind its request ends it too")
async def abort_at_once(target: Target) -> None:
    await _abort_until_over(target, stream=True)


@check("abort-silences", "after an acknowledged Abort no more than what was under way arrives")
async def abort_silences(target: Target) -> str:
    stream = await _running(target, target.new_id("abort"))
    await target.abort(stream.request.request_id)
    before, start = stream.tokens, monotonic()
    history = answered(await stream.end())
    late, seconds = stream.tokens - before, monotonic() - start
    allowed = 2 + int((target.rate or 0) * 0.05)
    over = history.complete().finish_reason != "abort"
    expect(late <= allowed or seconds < 0.05, f"{late} more tokens in {seconds:.2f} s")
    expect(not (over and seconds > STRAY_SECONDS), "it ran on to its own end")
    return f"{late} more tokens"


@check("abort-unknown", "Abort of an id that is not here is OK")
async def abort_unknown(target: Target) -> None:
    await target.abort(target.new_id("never"))


@check("abort-twice", "Abort may be repeated, and may come after the end")
async def abort_twice(target: Target) -> None:
    name = target.new_id("abort")
    stream = await _running(target, name)
    await asyncio.gather(target.abort(name), target.abort(name))
    answered(await stream.end())
    await target.abort(name)
    await target.generate(name)
    await target.abort(name)


@check("abort-whole-id", "Abort of req-1 leaves req-10 alone")
async def abort_whole_id(target: Target) -> None:
    name, tokens = target.new_id("abort"), target.tokens_for(1.0, 64)
    ten = target.send(target.request(f"{name}0", max_tokens=tokens))
    one = await _running(target, name)
    await target.abort(name)
    answered(await one.end())
    history = answered(await ten.end())
    made, reason = len(output(history)), history.complete().finish_reason
    expect(reason == "length" and made == tokens, f"{reason!r} after {made} of {tokens} tokens")


@check("abort-list", "one Abort ends all the ids it names")
async def abort_list(target: Target) -> None:
    names = [target.new_id("abort"), target.new_id("abort")]
    streams = [await _running(target, name) for name in names]
    await target.abort(*names)
    for stream in streams:
        history = answered(await asyncio.wait_for(stream.end(), STRAY_SECONDS * 5))
        reason = history.complete().finish_reason
        expect(reason in ("abort", "length"), f"finish_reason {reason!r}")
    if all(stream.history.complete().finish_reason == "length" for stream in streams):
        raise Failed("both ran to their own end")


async def _gone(target: Target, request_id: str, active: int) -> str:
    """The id is free and the count of active requests is back, soon after the client left."""
    start = monotonic()

    async def free() -> bool:
        again = await target.ask(target.request(request_id, max_tokens=1))
        if again.code is grpc.StatusCode.ALREADY_EXISTS:
            return False
        try:
            answered(again)
        except Failed as failure:
            raise Failed(f"the next request with its id: {failure}") from None
        return True

    async def quiet() -> bool:
        return await target.active() <= active

    expect(await becomes(free, FREE_SECONDS), f"the id is not free after {FREE_SECONDS:g} s")
    expect(
        await becomes(quiet, FREE_SECONDS),
        f"{await target.active()} active requests after {FREE_SECONDS:g} s, {active} before",
    )
    return f"gone in {(monotonic() - start) * 1000:.0f} ms"


@check("cancel-frees", "a cancelled call frees its id and its place in the engine")
async def cancel_frees(target: Target) -> str:
    active, name = await target.active(), target.new_id("cancel")
    await (await _running(target, name)).close()
    return await _gone(target, name, active)


@check("cancel-unary-frees", "cancelling a whole answer before it comes frees it too")
async def cancel_unary_frees(target: Target) -> str:
    active, name = await target.active(), target.new_id("cancel")
    stream = target.send(target.request(name, max_tokens=target.long, stream=False))

    async def begun() -> bool:
        return stream.ended or await target.active() > active

    await becomes(begun, 0.5)
    await stream.close()
    return await _gone(target, name, active)


@check("cancel-spares-others", "a cancel leaves the streams beside it whole")
async def cancel_spares_others(target: Target) -> None:
    tokens = target.tokens_for(1.0, 48)
    alone = output(await target.generate(max_tokens=tokens))
    other = target.send(target.request(max_tokens=tokens))
    for _ in range(3):
        await (await _running(target, target.new_id("cancel"))).close()
    ids = output(answered(await other.end()))
    expect(len(ids) == tokens, f"{len(ids)} of {tokens} tokens arrived")
    expect(ids[0] == alone[0], f"first id {ids[0]}, {alone[0]} alone")


@check("deadline", "a deadline ends the call DEADLINE_EXCEEDED and the request with it")
async def deadline(target: Target) -> str:
    active = await target.active()
    for seconds in (0.25, 0.05, 0.02, 0.01):
        name = target.new_id("deadline")
        request = target.request(name, max_tokens=target.long)
        history = await target.send(request, timeout=seconds).end()
        if history.code is grpc.StatusCode.OK:
            continue
        code = history.code
        expect(code is grpc.StatusCode.DEADLINE_EXCEEDED, f"ended {status(history)}")
        return await _gone(target, name, active)
    raise Failed(f"{target.long} tokens were made within 10 ms")


@check("connection-cut", "a connection that breaks ends its requests")
async def connection_cut(target: Target) -> str:
    active, name = await target.active(), target.new_id("cut")
    async with (
        relay(target.connection.target) as between,
        target.connection.open(through=between.address) as channel,
    ):
        stream = target.send(target.request(name, max_tokens=target.long), channel=channel)
        expect(await stream.first(), f"ended {status(stream.history)}")
        between.cut()
        await stream.end()
    return await _gone(target, name, active)
