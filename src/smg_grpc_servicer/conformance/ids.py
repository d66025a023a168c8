"""Request ids: the caller's, whole words, one request each at a time."""

from __future__ import annotations

import grpc

from smg_grpc_servicer.conformance.registry import Failed, Order, check, expect
from smg_grpc_servicer.conformance.target import LONG, Target, answered, output, status

REUSES = 10


@check("id-duplicate", "an id that is in flight is ALREADY_EXISTS; the first stream is unharmed")
async def id_duplicate(target: Target) -> None:
    # A fast engine may be done with the first before the second arrives: then a longer one.
    for wanted in (48, 400, LONG):
        name, tokens = target.new_id("twice"), min(wanted, target.long)
        first = target.send(target.request(name, max_tokens=tokens))
        expect(await first.first(), f"the first ended {status(first.history)}")
        second = await target.ask(target.request(name, max_tokens=2))
        if second.code is grpc.StatusCode.OK and first.ended:
            continue
        code = second.code
        expect(code is grpc.StatusCode.ALREADY_EXISTS, f"the second ended {status(second)}")
        expect(not second.messages, f"{len(second.messages)} messages for the second")
        history = answered(await first.end())
        made = len(output(history))
        expect(made == tokens, f"the first has {made} of {tokens} tokens")
        return
    raise Failed(f"{target.long} tokens are made faster than a second request arrives")


@check("id-reused", f"an id can be used again as soon as its stream ended, {REUSES} times")
async def id_reused(target: Target) -> None:
    name = target.new_id("again")
    for _ in range(REUSES):
        made = len(output(await target.generate(name, max_tokens=3)))
        expect(made == 3, f"{made} ids, 3 asked for")


@check("id-long", "an id of 200 characters is served")
async def id_long(target: Target) -> None:
    await target.generate(target.new_id("long").ljust(200, "x"))


@check("id-odd", "an id with spaces, slashes and letters of other scripts is served")
async def id_odd(target: Target) -> None:
    await target.generate(target.new_id("odd") + " /a:b%20*\u017e\u65e5")


@check("id-case", "ids that differ in case are two ids")
async def id_case(target: Target) -> None:
    name = target.new_id("case")
    lower = target.send(target.request(name, max_tokens=target.tokens_for(0.5, 32)))
    upper = target.send(target.request(name.upper(), max_tokens=2))
    answered(await upper.end())
    answered(await lower.end())


@check("id-empty", "a request without an id is INVALID_ARGUMENT naming request_id", Order.ROUGH)
async def id_empty(target: Target) -> None:
    history = await target.ask(target.request(""))
    expect(history.code is grpc.StatusCode.INVALID_ARGUMENT, f"ended {status(history)}")
    expect("request_id" in history.details, f"{status(history)} does not name request_id")
