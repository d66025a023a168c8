"""Results as an aligned table, a row as soon as it is known, and as JSON."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, TextIO

from smg_grpc_servicer.conformance.registry import Check
from smg_grpc_servicer.conformance.runner import Outcome, Result
from smg_grpc_servicer.conformance.target import Target

_OUTCOMES = {
    Outcome.PASS: "passed",
    Outcome.FAIL: "failed",
    Outcome.NOT_APPLICABLE: "not_applicable",
}


MOST_DETAIL = 160
"""Characters of detail in a row."""


class Table:
    """Name, promise, outcome, seconds, detail; widths are known before the first row."""

    def __init__(self, checks: Sequence[Check], out: TextIO | None = None) -> None:
        self._out = out or sys.stdout
        self._name = max((len(each.name) for each in checks), default=4)
        self._promise = max((len(each.promise) for each in checks), default=7)

    def header(self) -> None:
        self._line("name", "promise", "", "sec", "detail")

    def row(self, result: Result) -> None:
        detail = shortened(" ".join(result.detail.split()))
        self._line(
            result.check.name,
            result.check.promise,
            result.outcome.value,
            f"{result.seconds:.2f}",
            detail,
        )

    def listing(self, checks: Sequence[Check]) -> None:
        for each in checks:
            print(f"{each.name:<{self._name}}  {each.group:<10}  {each.promise}", file=self._out)

    def total(self, results: Sequence[Result], seconds: float) -> None:
        counts = counted(results)
        print(
            f"\n{counts['passed']} passed, {counts['failed']} failed, "
            f"{counts['not_applicable']} not applicable in {seconds:.1f} s",
            file=self._out,
        )

    def _line(self, name: str, promise: str, outcome: str, seconds: str, detail: str) -> None:
        left = f"{name:<{self._name}}  {promise:<{self._promise}}"
        line = f"{left}  {outcome:<4}  {seconds:>5}  {detail}"
        print(line.rstrip(), file=self._out, flush=True)


def shortened(text: str) -> str:
    """For the table; the JSON has all of it."""
    return text if len(text) <= MOST_DETAIL else text[: MOST_DETAIL - 1] + "\u2026"


def counted(results: Sequence[Result]) -> dict[str, int]:
    counts = Counter(_OUTCOMES[result.outcome] for result in results)
    return {name: counts[name] for name in _OUTCOMES.values()}


def document(target: Target, results: Sequence[Result], seconds: float) -> dict[str, Any]:
    """Everything, for machines."""
    return {
        "address": target.connection.target,
        "engine": target.dialect.engine,
        "service": target.dialect.service,
        "seconds": round(seconds, 3),
        **counted(results),
        "checks": [
            {
                "name": result.check.name,
                "group": result.check.group,
                "promise": result.check.promise,
                "outcome": _OUTCOMES[result.outcome].rstrip(),
                "seconds": round(result.seconds, 3),
                "detail": result.detail,
            }
            for result in results
        ],
    }
