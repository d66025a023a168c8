"""SGLang's control calls as the core asks for them: prefix cache, profiler, internal state.

All ranks are asked; one that refuses refuses for all, and says why.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence
from time import monotonic, time
from typing import Any

from smg_grpc_servicer.core.errors import DeadlineExceeded, FailedPrecondition
from smg_grpc_servicer.core.types import ProfileSpec
from smg_grpc_servicer.sglang import profiles
from smg_grpc_servicer.sglang.request_manager import RequestManager

FLUSH_SECONDS = 30.0
WAIT_SECONDS = 5.0
"""How long the scheduler is asked to wait at a time."""
AGAIN_SECONDS = 0.1
PROFILE_SECONDS = 600.0
STATE_SECONDS = 30.0
_OFF = ("0", "false", "no", "off")


async def flush_cache(manager: RequestManager, timeout: float | None) -> str:
    """The scheduler keeps one call waiting and refuses the others, and does not hear of a caller
    that left. So it is asked to wait for a little at a time, and again.

    :raises FailedPrecondition: requests are running and no time was given.
    :raises DeadlineExceeded: they still were when it was over.
    """
    from sglang.srt.managers.io_struct import FlushCacheReqInput

    end = monotonic() + (timeout or 0.0)
    while True:
        left = end - monotonic()
        request = FlushCacheReqInput(timeout_s=None if timeout is None else min(left, WAIT_SECONDS))
        replies = await _call(manager, request, "flush_cache_communicator", FLUSH_SECONDS)
        refusals = _refusals(replies, "requests are running; set timeout_s to wait for them")
        if not refusals:
            return "the prefix cache is empty"
        if timeout is None:
            raise FailedPrecondition(f"the prefix cache was not flushed: {refusals}")
        left = end - monotonic()
        if left <= 0:
            raise DeadlineExceeded(f"the prefix cache was not flushed in {timeout:g} s: {refusals}")
        await asyncio.sleep(min(left, AGAIN_SECONDS))


async def start_profile(manager: RequestManager, spec: ProfileSpec) -> str:
    """:raises InvalidArgument: the profiler would end the scheduler over it."""
    await asyncio.to_thread(profiles.check, spec)
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

    request = ProfileReq(
        req_type=ProfileReqType.START_PROFILE,
        output_dir=spec.output_dir,
        start_step=spec.start_step,
        num_steps=spec.num_steps,
        activities=list(spec.activities) or None,
        profile_by_stage=spec.profile_by_stage,
        with_stack=_allowed(spec.with_stack, "SGLANG_PROFILE_WITH_STACK"),
        record_shapes=_allowed(spec.record_shapes, "SGLANG_PROFILE_RECORD_SHAPES"),
        profile_id=str(time()),
    )
    return await _profile(manager, request)


async def stop_profile(manager: RequestManager) -> str:
    from sglang.srt.managers.io_struct import ProfileReq, ProfileReqType

    return await _profile(manager, ProfileReq(req_type=ProfileReqType.STOP_PROFILE))


async def internal_state(manager: RequestManager) -> list[dict[str, Any]]:
    """One dictionary per rank, as SGLang tells it: not redacted."""
    from sglang.srt.managers.io_struct import GetInternalStateReq

    replies = await _call(
        manager, GetInternalStateReq(), "get_internal_state_communicator", STATE_SECONDS
    )
    return [dict(reply.internal_state) for reply in replies]


async def _profile(manager: RequestManager, request: Any) -> str:
    replies = await _call(manager, request, "profile_communicator", PROFILE_SECONDS)
    refusals = _refusals(replies, "the profiler refused without a reason")
    if refusals:
        raise FailedPrecondition(refusals)
    return _words(replies) or "done"


async def _call(manager: RequestManager, request: Any, name: str, seconds: float) -> list[Any]:
    try:
        return await manager.send_communicator_req(request, name, seconds)
    except asyncio.TimeoutError:
        raise DeadlineExceeded(
            f"the scheduler did not answer {type(request).__name__} in {seconds:g} s"
        ) from None


def _refusals(replies: Sequence[Any], otherwise: str) -> str:
    words = [reply.message.strip() or otherwise for reply in replies if not reply.success]
    return " | ".join(dict.fromkeys(words))


def _words(replies: Sequence[Any]) -> str:
    return " | ".join(dict.fromkeys(reply.message for reply in replies if reply.message))


def _allowed(asked: bool | None, switch: str) -> bool:
    """On unless it was asked to be off or the operator's switch says so, as SGLang reads them."""
    return asked is not False and os.environ.get(switch, "true").strip().lower() not in _OFF
