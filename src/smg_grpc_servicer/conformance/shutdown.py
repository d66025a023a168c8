"""The end of a server: SIGTERM to the process given by --shutdown-pid, seen from outside.

One shutdown serves all these checks; it is run by the first of them.
"""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any

import grpc
from grpc_health.v1 import health_pb2

from smg_grpc_servicer.conformance.registry import Failed, NotApplicable, Order, check, expect
from smg_grpc_servicer.conformance.target import Target, answered, becomes, status
from smg_grpc_servicer.testing.history import History

STREAM_SECONDS = 1.5
NEWS_SECONDS = 5.0
EXIT_SECONDS = 35.0
"""Kubernetes kills after 30 s; a little more shows who is late rather than who is killed."""


@dataclass(slots=True)
class Ending:
    """What was seen; None for what never came."""

    not_serving_after: float | None = None
    refusal: History | None = None
    stream: History | None = None
    exit_after: float | None = None


_endings: dict[int, Ending] = {}
"""By process: one shutdown, several checks."""


async def _ending(target: Target) -> Ending:
    pid = target.shutdown_pid
    if pid is None:
        raise NotApplicable("no --shutdown-pid given")
    if pid not in _endings:
        _endings[pid] = await _end(target, pid)
    return _endings[pid]


async def _end(target: Target, pid: int) -> Ending:
    seen = Ending()
    tokens = min(target.long, max(64, int((target.rate or 20.0) * STREAM_SECONDS)))
    stream = target.send(target.request(max_tokens=tokens), timeout=EXIT_SECONDS)
    request = health_pb2.HealthCheckRequest(service=target.dialect.service)
    watch: Any = target.health.Watch(request, metadata=target.connection.metadata)
    expect((await watch.read()) is not grpc.aio.EOF, "the Watch ended at once")
    expect(await stream.first(), f"the stream ended {status(stream.history)}")
    start = monotonic()
    os.kill(pid, signal.SIGTERM)
    if await _turned(watch):
        seen.not_serving_after = monotonic() - start
    if not stream.ended:
        seen.refusal = await target.ask(target.request(max_tokens=1))
    seen.stream = await stream.end()
    watch.cancel()

    async def gone() -> bool:
        return not _exists(pid)

    if await becomes(gone, EXIT_SECONDS):
        seen.exit_after = monotonic() - start
    return seen


async def _turned(watch: Any) -> bool:
    """Whether the Watch says NOT_SERVING before it ends or the time is over."""
    reading = asyncio.ensure_future(_not_serving(watch))
    await asyncio.wait({reading}, timeout=NEWS_SECONDS)
    if not reading.done():
        reading.cancel()
        return False
    return await reading


async def _not_serving(watch: Any) -> bool:
    try:
        while (message := await watch.read()) is not grpc.aio.EOF:
            if message.status == health_pb2.HealthCheckResponse.NOT_SERVING:
                return True
    except grpc.aio.AioRpcError:
        return False
    return False


def _exists(pid: int) -> bool:
    """Whether the process runs; one that has ended and waits for its parent does not."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
    except OSError:
        return not Path("/proc/self").exists()  # Where there is no procfs, kill's word counts.
    return stat.rpartition(b")")[2].split()[0] not in (b"Z", b"X")


@check("shutdown-readiness", "SIGTERM turns an open Watch to NOT_SERVING", Order.LAST)
async def shutdown_readiness(target: Target) -> str:
    seen = (await _ending(target)).not_serving_after
    if seen is None:
        raise Failed("the Watch never said NOT_SERVING")
    return f"after {seen * 1000:.0f} ms"


@check("shutdown-refuses", "after SIGTERM a new request is UNAVAILABLE", Order.LAST)
async def shutdown_refuses(target: Target) -> None:
    refusal = (await _ending(target)).refusal
    if refusal is None:
        raise Failed("the running stream ended before a new request could be tried")
    expect(refusal.code is grpc.StatusCode.UNAVAILABLE, f"ended {status(refusal)}")


@check("shutdown-drains", "a stream that runs at SIGTERM is served to its end", Order.LAST)
async def shutdown_drains(target: Target) -> str:
    history = (await _ending(target)).stream
    if history is None:
        raise Failed("there was no stream")
    complete = answered(history).complete()
    reason = complete.finish_reason
    expect(reason == "length", f"finish_reason {reason!r}")
    return f"{complete.completion_tokens} tokens"


@check(
    "shutdown-exits", "after SIGTERM the process ends, within what Kubernetes grants", Order.LAST
)
async def shutdown_exits(target: Target) -> str:
    seen = (await _ending(target)).exit_after
    if seen is None or seen > 30:
        raise Failed(f"the process is still there after {EXIT_SECONDS:g} s")
    return f"after {seen:.1f} s"
