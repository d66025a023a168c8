"""What a check is, and the list of them.

A check is a small async function of a `Target` that raises `Failed` with what it saw instead of
what was promised, or `NotApplicable` with the reason; what it returns is shown as a remark.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from smg_grpc_servicer.conformance.target import Target

Body = Callable[["Target"], Coroutine[Any, Any, "str | None"]]


class Failed(AssertionError):
    """The promise does not hold; the message says what was seen."""


class NotApplicable(Exception):
    """The proto cannot say it, the server does not have it, or an option is missing."""


class Order(IntEnum):
    """When a check runs."""

    GENTLE = 0
    ROUGH = 1
    """Input that took down servers in the wild; each is followed by a probe."""
    LAST = 2
    """Ends the server."""


@dataclass(frozen=True, slots=True)
class Check:
    name: str
    promise: str
    group: str
    order: Order
    body: Body


CHECKS: dict[str, Check] = {}
"""By name, in the order of definition; filled when the modules of checks are imported."""


def check(name: str, promise: str, order: Order = Order.GENTLE) -> Callable[[Body], Body]:
    """Register the decorated function; its group is the module it stands in."""

    def register(body: Body) -> Body:
        add(Check(name, promise, body.__module__.rpartition(".")[2], order, body))
        return body

    return register


def add(new: Check) -> None:
    if new.name in CHECKS:
        raise ValueError(f"two checks are named {new.name}")
    CHECKS[new.name] = new


def expect(holds: object, otherwise: str) -> None:
    """:raises Failed: `holds` is false."""
    if not holds:
        raise Failed(otherwise)
