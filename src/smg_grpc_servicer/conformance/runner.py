"""Runs checks one after the other and says what came of each.

A check has a time limit. After one that failed, and after every rough one, the server is probed;
when it served at first and no longer does, the checks that are left are not run and count as
failed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum
from time import monotonic

import grpc

from smg_grpc_servicer.conformance.connect import Connection, Unusable, detect
from smg_grpc_servicer.conformance.registry import Check, Failed, NotApplicable, Order
from smg_grpc_servicer.conformance.target import Facts, Target
from smg_grpc_servicer.testing.dialects import Unsayable

LAST_SECONDS = 90.0
"""Time limit of the checks that end the server: they wait for the drain."""


class Outcome(Enum):
    PASS = "pass"
    FAIL = "FAIL"
    NOT_APPLICABLE = "n/a"


@dataclass(frozen=True, slots=True)
class Result:
    check: Check
    outcome: Outcome
    seconds: float
    detail: str = ""


async def prepare(
    connection: Connection,
    *,
    engine: str | None = None,
    prompt: Sequence[int] = (5, 6, 7),
    vocab_size: int | None = None,
    timeout: float = 20.0,
    shutdown_pid: int | None = None,
) -> Target:
    """Reach the server and learn what it is. :raises Unusable: there is nothing to check."""
    dialect = await detect(connection, engine, timeout)
    target = Target(
        connection, dialect, Facts(), prompt=prompt, timeout=timeout, shutdown_pid=shutdown_pid
    )
    try:
        info = await target.management("GetModelInfo")
    except grpc.aio.AioRpcError:
        facts = Facts(vocab_size)  # A check of its own says so.
    else:
        facts = Facts(
            vocab_size or info.vocab_size or None,
            info.max_context_length or None,
            tuple(info.eos_token_ids),
        )
    target.facts = facts
    outside = [token for token in prompt if facts.vocab_size and token >= facts.vocab_size]
    if outside or not prompt:
        await target.close()
        what = (
            f"{outside[0]} is outside the vocabulary of {facts.vocab_size}" if outside else "empty"
        )
        raise Unusable(f"--prompt-ids: {what}")
    return target


async def run(
    target: Target, checks: Sequence[Check], tell: Callable[[Result], None] = lambda result: None
) -> list[Result]:
    """Run `checks`; each result is told as it comes."""
    results: list[Result] = []
    gone: str | None = None
    served = await _probe(target) is None
    for each in checks:
        if gone is not None:
            result = Result(each, Outcome.FAIL, 0.0, f"not run: {gone}")
        else:
            result = await _one(target, each)
            rough = each.order is Order.ROUGH and result.outcome is not Outcome.NOT_APPLICABLE
            shaken = rough or result.outcome is Outcome.FAIL
            if served and shaken and each.order is not Order.LAST:
                dead = await _probe(target)
                if dead is not None:
                    gone = f"the server no longer serves since {each.name}"
                    detail = f"{result.detail}; then a plain request ended {dead}".lstrip("; ")
                    result = Result(each, Outcome.FAIL, result.seconds, detail)
        results.append(result)
        tell(result)
    return results


async def _probe(target: Target) -> str | None:
    """None when a plain request is served, else what happened."""
    try:
        return await asyncio.wait_for(target.probe(), target.timeout)
    except asyncio.TimeoutError:
        return f"with no answer within {target.timeout:g} s"
    finally:
        await target.tidy()


async def _one(target: Target, each: Check) -> Result:
    start = monotonic()
    limit = target.timeout if each.order is not Order.LAST else max(LAST_SECONDS, target.timeout)
    outcome, detail = Outcome.PASS, ""
    try:
        remark = await asyncio.wait_for(each.body(target), limit)
        detail = remark or ""
    except NotApplicable as reason:
        outcome, detail = Outcome.NOT_APPLICABLE, str(reason)
    except Unsayable as reason:
        outcome, detail = Outcome.NOT_APPLICABLE, f"the proto has no such field: {reason}"
    except Failed as failure:
        outcome, detail = Outcome.FAIL, str(failure)
    except asyncio.TimeoutError:
        outcome, detail = Outcome.FAIL, f"not done within {limit:g} s"
    except grpc.aio.AioRpcError as error:
        outcome, detail = Outcome.FAIL, f"a call ended {error.code().name} {error.details()!r}"
    except LookupError as error:
        outcome, detail = Outcome.FAIL, str(error)
    seconds = monotonic() - start
    await _tidy(target)
    return Result(each, outcome, seconds, detail)


async def _tidy(target: Target) -> None:
    try:
        await asyncio.wait_for(target.tidy(), target.timeout)
    except asyncio.TimeoutError:
        return  # It hangs; the probe that follows says so.
