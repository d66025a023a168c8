"""Long work that shows itself: a bar in a terminal, plain log lines everywhere else."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from time import monotonic
from typing import Any

log = logging.getLogger(__name__)

Advance = Callable[[float], None]

LINE_SECONDS = 5.0
"""Least time between two lines of one piece of work."""


@contextmanager
def progress(what: str, total: float, unit: str = "B") -> Iterator[Advance]:
    """Yields `advance(amount)`; `total` and amounts in `unit`. Ends with one line in a log.

    The bar needs tqdm, which every engine brings along; without it there are lines.
    """
    bar = _bar(what, total, unit) if sys.stderr.isatty() else None
    if bar is not None:
        try:
            yield bar.update
        finally:
            bar.close()
        return
    lines = _Lines(what, total)
    log.info("%s", what)
    yield lines.advance
    log.info("%s: done in %.1f s", what, monotonic() - lines.start)


def _bar(what: str, total: float, unit: str) -> Any:
    try:
        from tqdm import tqdm
    except ImportError:
        return None
    return tqdm(desc=what, total=total, unit=unit, unit_scale=True, leave=False)


class _Lines:
    def __init__(self, what: str, total: float) -> None:
        self.start = self._told = monotonic()
        self._what = what
        self._total = total
        self._done = 0.0

    def advance(self, amount: float) -> None:
        self._done += amount
        now = monotonic()
        if now - self._told >= LINE_SECONDS and self._total:
            self._told = now
            log.info("%s: %d %%", self._what, 100 * self._done / self._total)
