"""`SMG_KV_EVENT_HASH_CHECK`: do the hashes that an engine publishes follow from its tokens?

The gateway takes an engine's hashes as they are; a fork that computes them in another way, or a
publisher that pairs them with other tokens, shows only in bad routing. Each stored block whose
parent's digest is known is computed anew and counted: checked, mismatch, unverifiable. Nothing is
ever dropped for it. Sources: `get_hash_str` of sglang/srt/mem_cache/utils.py; `hash_block_tokens`
of vllm/v1/core/kv_cache_utils.py, with `--prefix-caching-hash-algo sha256_cbor`.
"""

from __future__ import annotations

import logging
import os
from abc import ABC, abstractmethod
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import sha256
from importlib import import_module
from typing import Any

from smg_grpc_servicer.kv_events.decode import AnyStored, StoredPairs, fold

log = logging.getLogger(__name__)

VARIABLE = "SMG_KV_EVENT_HASH_CHECK"
KEPT = 1 << 18
"""Digests kept for children to come; the oldest go first."""


class HashCheck(ABC):
    """Of one engine; used by one thread."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self._digests: OrderedDict[int, bytes] = OrderedDict()

    def stored(self, event: AnyStored, hashes: Sequence[int]) -> None:
        """An event that is forwarded; `hashes` are its own, folded."""
        prior = self._prior(event)
        size = event.block_size
        for at, block_hash in enumerate(hashes):
            made = None if prior is None else self._digest(event, prior, at, at * size)
            if made is None:
                self.counts["unverifiable"] += 1
            elif self._published(made) != block_hash:
                self._differs(event, block_hash)
                made = None
            else:
                self.counts["checked"] += 1
                self._digests[block_hash] = made
                if len(self._digests) > KEPT:
                    self._digests.popitem(last=False)
            prior = made

    def totals(self) -> dict[str, int]:
        return {f"hash_{name}": self.counts[name] for name in _NAMES}

    def _prior(self, event: AnyStored) -> bytes | None:
        parent = event.parent_block_hash
        if parent is None:
            return self._seed(event)
        return parent if isinstance(parent, bytes) else self._digests.get(fold(parent))

    def _differs(self, event: AnyStored, block_hash: int) -> None:
        if not self.counts["mismatch"]:
            log.warning("the hash of block %d does not follow from its tokens", block_hash)
        self.counts["mismatch"] += 1

    @abstractmethod
    def _seed(self, event: AnyStored) -> bytes | None:
        """What a first block's digest is computed from; None = nobody can tell."""

    @abstractmethod
    def _digest(self, event: AnyStored, prior: bytes, at: int, start: int) -> bytes | None:
        """Of the block with that index, whose tokens begin at `start`."""

    @abstractmethod
    def _published(self, digest: bytes) -> int:
        """What goes into an event."""


_NAMES = ("checked", "mismatch", "unverifiable")


class SglangCheck(HashCheck):
    """SHA-256 over the prior digest and each token in four bytes; of pairs both."""

    def _seed(self, event: AnyStored) -> bytes | None:
        if event.lora_name:
            return None  # An adapter's hashes are hashed once more, with its key.
        if event.cache_salt:
            return sha256(b"sglang-cache-salt-v1\0" + event.cache_salt.encode()).digest()
        return b""

    def _digest(self, event: AnyStored, prior: bytes, at: int, start: int) -> bytes | None:
        end = start + event.block_size
        words: Sequence[int] = event.token_ids[start:end]
        if isinstance(event, StoredPairs):
            pairs = zip(words, event.next_ids[start:end], strict=True)
            words = [word for pair in pairs for word in pair]
        return sha256(prior + b"".join(word.to_bytes(4, "little") for word in words)).digest()

    def _published(self, digest: bytes) -> int:
        return int.from_bytes(digest[:8], "big", signed=True)

    def _differs(self, event: AnyStored, block_hash: int) -> None:
        if event.cache_salt:
            # The format `dynamo` hashes salted ones once more.
            self.counts["unverifiable"] += 1
        else:
            super()._differs(event, block_hash)


class VllmCheck(HashCheck):
    """SHA-256 over canonical CBOR of the parent's digest, the tokens and the extra keys."""

    def __init__(self, environ: Mapping[str, str]) -> None:
        """:raises ImportError: cbor2, which vLLM brings along, is not here."""
        super().__init__()
        self._dumps: Any = import_module("cbor2").dumps
        self._none = self._hash(environ.get("PYTHONHASHSEED", "vllm-none-hash"))

    def _hash(self, value: object) -> bytes:
        return sha256(self._dumps(value, canonical=True)).digest()

    def _seed(self, event: AnyStored) -> bytes | None:
        return self._none

    def _digest(self, event: AnyStored, prior: bytes, at: int, start: int) -> bytes | None:
        if event.lora_name or event.lora_id is not None or isinstance(event, StoredPairs):
            return None  # The adapter's path is in the hash and not in the event.
        told = event.extra_keys
        keys = None
        if told is not None and at < len(told) and told[at]:
            keys = tuple(map(_tagged, told[at]))
            if None in keys:
                return None
        tokens = tuple(event.token_ids[start : start + event.block_size])
        return self._hash((prior, tokens, keys))

    def _published(self, digest: bytes) -> int:
        return int.from_bytes(digest[-8:], "big", signed=True)


def _tagged(key: Any) -> tuple[Any, ...] | None:
    """An extra key as it is hashed; events have them without their tags."""
    if isinstance(key, str):
        return ("cache_salt", key)
    if isinstance(key, bytes):
        return ("prompt_embeds", key)
    if isinstance(key, (list, tuple)) and len(key) == 2:
        return ("mm", *key)
    return None


def make(environ: Mapping[str, str] | None = None) -> HashCheck | None:
    """What the variable asks for; a word that nobody knows is a warning, and no check."""
    env = os.environ if environ is None else environ
    asked = env.get(VARIABLE, "").strip().lower().replace("_", "-")
    if not asked:
        return None
    try:
        if asked == "sglang":
            return SglangCheck()
        if asked == "vllm-sha256-cbor":
            return VllmCheck(env)
    except ImportError as error:
        log.warning("%s is off: %s", VARIABLE, error)
        return None
    log.warning("%s is off: got %r; allowed: sglang or vllm-sha256-cbor", VARIABLE, env[VARIABLE])
    return None
