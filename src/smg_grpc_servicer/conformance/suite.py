"""All checks, in the order they run: gentle, then rough, then what ends the server."""

from __future__ import annotations

from collections.abc import Iterable
from fnmatch import fnmatchcase

from smg_grpc_servicer.conformance import (  # noqa: F401 # each registers its checks
    cancel,
    facts,
    health,
    ids,
    life,
    logprobs,
    sampling,
    shutdown,
    tokenizer,
    transport,
    validation,
)
from smg_grpc_servicer.conformance.registry import CHECKS, Check

GROUPS = (
    "life", "logprobs", "sampling", "cancel", "ids", "validation", "health", "facts", "tokenizer",
    "transport", "shutdown",
)  # fmt: skip
"""As shown and run, inside what `Order` leaves open."""


class UnknownCheck(Exception):
    """A name or pattern that no check has."""


def select(only: Iterable[str] = ()) -> list[Check]:
    """The checks named, by name, group or shell pattern; all when none is.

    :raises UnknownCheck: a name that fits nothing.
    """
    chosen: dict[str, Check] = {}
    for pattern in only:
        found = {
            name: each
            for name, each in CHECKS.items()
            if fnmatchcase(name, pattern) or each.group == pattern
        }
        if not found:
            raise UnknownCheck(
                f"--only: no check is named {pattern!r}; --list shows them all, "
                f"the groups are {', '.join(GROUPS)}"
            )
        chosen |= found
    return sorted((chosen or CHECKS).values(), key=_place)


def _place(check: Check) -> tuple[int, int]:
    return check.order, GROUPS.index(check.group)
