"""Reuse of prompt prefixes across requests, bounded by bytes, least recently used goes first.

The caches are mlx-lm's; the index is not its `LRUPromptCache`, whose search walks every stored
sequence that shares a first token and copies lists on the way: 0.9 s beside eleven 8,000-token
conversations, on the thread that decodes. Here a look-up compares token arrays: microseconds an
entry. A hit never covers the whole prompt: the last token is always left to be fed, because its
logits are what the first output token is drawn from. Used on the generation thread only.
"""

from __future__ import annotations

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from smg_grpc_servicer.mlx.runtime.caches import Caches, launch, part, states
from smg_grpc_servicer.mlx.runtime.job import describe

logger = logging.getLogger(__name__)

MIN_TOKENS = 32
"""Shorter prefixes cost more to keep than to compute."""
MAX_ENTRIES = 1024
"""Keeps a look-up under a few milliseconds; bytes are what bounds memory."""


@dataclass(frozen=True, slots=True, eq=False)
class _Entry:
    tokens: Any
    """int32 array; the caches hold exactly these."""
    caches: Caches
    size: int


class PrefixCache:
    def __init__(self, max_bytes: int) -> None:
        """0 bytes: no cache."""
        self._max_bytes = max_bytes
        self._entries: OrderedDict[bytes, _Entry] = OrderedDict()
        """By their tokens; the most recently used last."""
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
        wanted = np.asarray(tokens[:-1], dtype=np.int32)
        best, length = None, MIN_TOKENS - 1
        for key, entry in self._entries.items():
            common = _common(entry.tokens, wanted)
            if common > length:
                best, length = key, common
        if best is None:
            return None, 0
        self._entries.move_to_end(best)
        self.hits += 1
        self.hit_tokens += length
        return _first(self._entries[best], length), length

    def _store(self, tokens: Sequence[int], caches: Caches) -> None:
        if not all(c.is_trimmable() for c in caches):
            return
        size = sum(c.nbytes for c in caches)
        if size > self._max_bytes:
            return
        kept = np.asarray(tokens, dtype=np.int32)
        for key, entry in list(self._entries.items()):
            common = _common(entry.tokens, kept)
            if common == len(kept):
                self._entries.move_to_end(key)
                return
            if common == len(entry.tokens):
                self._drop(key)
        # Evaluated now, or the entry would keep the whole batch's memory alive.
        launch(states(caches))
        self._entries[kept.tobytes()] = _Entry(kept, caches, size)
        self._bytes += size
        while self._bytes > self._max_bytes or len(self._entries) > MAX_ENTRIES:
            self._drop(next(iter(self._entries)))

    def accepts(self, length: int) -> bool:
        """Whether a sequence of this length is worth extracting."""
        return self._max_bytes > 0 and length > MIN_TOKENS

    def clear(self) -> int:
        """Forget everything; the number of entries dropped."""
        count = len(self._entries)
        self._entries.clear()
        self._bytes = 0
        return count

    def counters(self) -> dict[str, int]:
        return {
            "prefix_entries": len(self._entries),
            "prefix_bytes": self._bytes,
            "prefix_hits": self.hits,
            "prefix_hit_tokens": self.hit_tokens,
        }

    def _give_up(self, what: str, error: Exception) -> None:
        """A cache is no reason for a request to fail: forget everything and go on without."""
        logger.warning("prefix cache emptied: a prefix was not %s: %s", what, describe(error))
        self.clear()

    def _drop(self, key: bytes) -> None:
        self._bytes -= self._entries.pop(key).size


def _common(left: Any, right: Any) -> int:
    """Length of the common prefix of two token arrays."""
    width = min(len(left), len(right))
    # Most pairs differ at once: look at the first few before all.
    if width > MIN_TOKENS and (left[:MIN_TOKENS] != right[:MIN_TOKENS]).any():
        width = MIN_TOKENS
    differs = left[:width] != right[:width]
    return int(differs.argmax()) if differs.any() else width


def _first(entry: _Entry, length: int) -> Caches:
    """The entry's caches cut to `length`; arrays are shared until one side writes."""
    caches = copy.deepcopy(entry.caches)
    for cache in caches:
        cache.trim(len(entry.tokens) - length)
    # The first write copies what is shared; most of it would be for nothing here.
    return part(caches, 1, 0) if 2 * length < len(entry.tokens) else caches
