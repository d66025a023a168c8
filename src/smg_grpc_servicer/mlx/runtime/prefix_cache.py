"""Reuse of prompt prefixes across requests, bounded by bytes, least recently used goes first.

The caches are mlx-lm's; the index is not its `LRUPromptCache`, whose search walks every stored
sequence that shares a first token and copies lists on the way: 0.9 s beside eleven 8,000-token
conversations, on the thread that decodes. Here sequences are kept sorted, so the longest common
prefix is with a neighbour of the place where the wanted one would stand. A hit never covers the
whole prompt: the last token is always left to be fed, because its logits are what the first
output token is drawn from. Used on the generation thread only.
"""

from __future__ import annotations

import copy
import logging
from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smg_grpc_servicer.mlx.runtime.caches import Caches, launch, part, states
from smg_grpc_servicer.mlx.runtime.job import describe

logger = logging.getLogger(__name__)

MIN_TOKENS = 64
"""Shorter prefixes cost more to keep than to compute."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    caches: Caches
    length: int
    """Tokens in the caches."""
    size: int
    """Bytes."""


class PrefixCache:
    def __init__(self, max_bytes: int) -> None:
        """0 bytes: no cache."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By their key; the most recently used last. No key is a prefix of another."""
        self._sorted: list[bytes] = []
        self._bytes = 0
        self.hits = 0
        self.hit_tokens = 0

    def fetch(self, tokens: Sequence[int]) -> tuple[Caches | None, int]:
        """Caches of one's own for the longest known prefix, and its length in tokens."""
        try:
            return self._fetch(tokens)
        except Exception as error:
            self._give_up("looked up", error)
            return None, 0

    def store(self, tokens: Sequence[int], take: Callable[[], Caches]) -> None:
        """Keep what `take` returns: caches that hold exactly `tokens` and are not shared."""
        if not self.accepts(len(tokens)):
            return
        try:
            self._store(tokens, take())
        except Exception as error:
            self._give_up("stored", error)

    def _fetch(self, tokens: Sequence[int]) -> tuple[Caches | None, int]:
        if not self._entries or len(tokens) <= MIN_TOKENS:
            return None, 0
        wanted = _key(tokens[:-1])
        length, best = max((_common(key, wanted), key) for key in self._neighbours(wanted))
        if length < MIN_TOKENS:
            return None, 0
        self._entries.move_to_end(best)
        self.hits += 1
        self.hit_tokens += length
        return _first(self._entries[best], length), length

    def _store(self, tokens: Sequence[int], caches: Caches) -> None:
        size = sum(c.nbytes for c in caches)
        if size > self._max_bytes or not all(c.is_trimmable() for c in caches):
            return
        key = _key(tokens)
        for other in self._neighbours(key):
            if other.startswith(key):
                self._entries.move_to_end(other)
                return
            if key.startswith(other):
                self._drop(other)
        # Evaluated now, or the entry would keep the whole batch's memory alive.
        launch(states(caches))
        self._entries[key] = _Entry(caches, len(tokens), size)
        insort(self._sorted, key)
        self._bytes += size
        while self._bytes > self._max_bytes:
            self._drop(next(iter(self._entries)))

    def _neighbours(self, key: bytes) -> list[bytes]:
        place = bisect_left(self._sorted, key)
        return self._sorted[max(place - 1, 0) : place + 1]

    def accepts(self, length: int) -> bool:
        """Whether a sequence of this length is worth extracting."""
        return self._max_bytes > 0 and length > MIN_TOKENS

    def clear(self) -> int:
        """Forget everything; the number of entries dropped."""
        count = len(self._entries)
        self._entries.clear()
        self._sorted.clear()
        self._bytes = 0
        return count

    def counters(self) -> dict[str, int]:
        return {
            "prefix_entries": len(self._entries),
            "prefix_bytes": self._bytes,
            "prefix_hits_total": self.hits,
            "prefix_hit_tokens_total": self.hit_tokens,
        }

    def _give_up(self, what: str, error: Exception) -> None:
        """A cache is no reason for a request to fail: forget everything and go on without."""
        logger.warning("prefix cache emptied: a prefix was not %s: %s", what, describe(error))
        self.clear()

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._entries.pop(key).size
        del self._sorted[bisect_left(self._sorted, key)]


def _key(tokens: Sequence[int]) -> bytes:
    """Bytes that sort as the tokens do."""
    key: bytes = np.asarray(tokens, dtype=">u4").tobytes()
    return key


def _common(left: bytes, right: bytes) -> int:
    """Number of tokens that two keys begin with in common."""
    width = min(len(left), len(right)) // 4
    a: Any = np.frombuffer(left, dtype=np.uint32, count=width)
    differs = a != np.frombuffer(right, dtype=np.uint32, count=width)
    return int(differs.argmax()) if differs.any() else width


def _first(entry: _Entry, length: int) -> Caches:
    """The entry's caches cut to `length`; arrays are shared until one side writes."""
    caches = copy.deepcopy(entry.caches)
    for cache in caches:
        cache.trim(entry.length - length)
    # The first write copies what is shared; most of it would be for nothing here.
    return part(caches, 1, 0) if 2 * length < entry.length else caches
