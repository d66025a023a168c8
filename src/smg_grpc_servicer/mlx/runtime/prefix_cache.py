"""Reuse of prompt prefixes across requests: mlx-lm's `LRUPromptCache`, bounded by bytes.

A hit never covers the whole prompt: the last token is always left to be fed, because its logits
are what the first output token is drawn from. Used on the generation thread only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.mlx.runtime.caches import KNOWN_VERSIONS, Caches, launch, part, states

MIN_TOKENS = 32
"""Shorter prefixes cost more to keep than to compute."""
MAX_ENTRIES = 4096
"""The bound that matters is bytes; this one only keeps mlx-lm's default of ten out of the way."""
_MODEL = "model"


class PrefixCache:
    def __init__(self, max_bytes: int) -> None:
        """0 bytes: no cache."""
        self._max_bytes = max_bytes
        self._lru: Any = None
        self.hits = 0
        self.hit_tokens = 0
        if max_bytes <= 0:
            return
        try:
            from mlx_lm.models.cache import LRUPromptCache
        except ImportError as error:
            raise ConfigError(
                "mlx_lm.models.cache.LRUPromptCache is missing (set --prompt-cache-bytes 0 to do"
                f" without); known to work: {KNOWN_VERSIONS}"
            ) from error
        self._lru = LRUPromptCache(max_size=MAX_ENTRIES, max_bytes=max_bytes)

    @property
    def enabled(self) -> bool:
        return self._lru is not None

    def fetch(self, tokens: Sequence[int]) -> tuple[Caches | None, int]:
        """A copy of the caches for the longest known prefix, and its length in tokens."""
        if self._lru is None or len(tokens) <= MIN_TOKENS:
            return None, 0
        known, rest = self._lru.fetch_nearest_cache(_MODEL, list(tokens))
        if known is not None and not rest:
            if not all(c.is_trimmable() for c in known):
                return None, 0
            for cache in known:
                cache.trim(1)
            rest = tokens[-1:]
        length = len(tokens) - len(rest)
        if known is None or length < MIN_TOKENS:
            return None, 0
        self.hits += 1
        self.hit_tokens += length
        return known, length

    def store(self, tokens: Sequence[int], caches: Caches) -> None:
        """Keep `caches`, which hold exactly `tokens` and must not be written to afterwards."""
        if not self.accepts(len(tokens)) or not all(c.is_trimmable() for c in caches):
            return
        launch(states(caches))
        if sum(c.nbytes for c in caches) <= self._max_bytes:
            self._lru.insert_cache(_MODEL, list(tokens), caches)

    def store_copy(self, tokens: Sequence[int], caches: Caches) -> None:
        """As `store`, for caches that go on growing."""
        if self.accepts(len(tokens)):
            self.store(tokens, part(caches, 1, 0))

    def accepts(self, length: int) -> bool:
        """Whether a sequence of this length is worth extracting."""
        return self._lru is not None and length > MIN_TOKENS

    def clear(self) -> int:
        """Forget everything; the number of entries dropped."""
        if self._lru is None:
            return 0
        entries = len(self._lru)
        self._lru.trim_to(n_sequences=0)
        return entries

    def counters(self) -> dict[str, int]:
        entries = 0 if self._lru is None else len(self._lru)
        size = 0 if self._lru is None else int(self._lru.nbytes)
        return {
            "prefix_entries": entries,
            "prefix_bytes": size,
            "prefix_hits": self.hits,
            "prefix_hit_tokens": self.hit_tokens,
        }
