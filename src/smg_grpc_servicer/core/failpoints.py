"""Named points where a test may hold, delay or break a request; nothing happens at them otherwise.

A point costs one attribute test while none is armed; what is armed counts for requests that come
later. `arm` is for tests only: a server started by our commands refuses nothing and arms nothing.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

Action = Callable[[], Awaitable[None]]
Write = Callable[[Any], Awaitable[None]]

active: dict[str, Action] = {}

NAMES = (
    "admitted",
    "before_submit",
    "after_submit",
    "before_write",
    "after_write",
    "before_complete",
    "after_complete",
)
"""In the order a streamed request meets them. On a server of ours the last message is gRPC's to
send: the request has left then, and nothing comes after it."""


async def hit(name: str) -> None:
    """Run what was armed at this point. Callers test `active` first to keep it free."""
    action = active.get(name)
    if action is not None:
        await action()


def writing(write: Write) -> Write:
    """A stream's `write` with the points around it; itself while none is armed."""
    if not active:
        return write

    async def watched(message: Any) -> None:
        kind = "complete" if message.HasField("complete") else "write"
        await hit(f"before_{kind}")
        await write(message)
        await hit(f"after_{kind}")

    return watched


@contextmanager
def arm(name: str, action: Action) -> Iterator[None]:
    """Run `action` whenever a request comes by `name`, for the length of a block."""
    if name not in NAMES:
        raise ValueError(f"no fail point is named {name!r}; there are {', '.join(NAMES)}")
    active[name] = action
    try:
        yield
    finally:
        del active[name]
