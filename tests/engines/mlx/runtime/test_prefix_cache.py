"""Reused prefixes change how long a prompt takes, never what comes out."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.mlx.runtime.job import Job
from smg_grpc_servicer.mlx.runtime.loop import GenerationLoop
from smg_grpc_servicer.mlx.runtime.prefix_cache import MIN_TOKENS, PrefixCache
from tests.support.mlx_loop import GREEDY, Sink, generate, running

BASE = [3 + (i * 17) % 500 for i in range(200)]
NO_CACHE = {"prompt_cache_bytes": 0}


def cold(model: Any, prompt: list[int], tokens: int = 10) -> list[int]:
    with running(model, **NO_CACHE) as (loop, sink):
        return generate(loop, sink, [prompt], tokens, "cold")[0]


def run(loop: GenerationLoop, sink: Sink, uid: str, prompt: list[int]) -> tuple[list[int], int]:
    """Output, and the cached tokens that were reported (once)."""
    loop.submit(Job(uid, prompt, 10, GREEDY))
    sink.ended(uid)
    (cached,) = sink.cached[uid]
    return sink.ids[uid], cached


@pytest.mark.parametrize("budget", [32, 1000])
def test_same_output_and_the_hit_is_told(tiny: Any, budget: int) -> None:
    """With the prompt as a short one and in chunks: exact, longer, shorter and diverging."""
    with running(tiny.model, prefill_budget=budget, idle_prefill_budget=budget) as (loop, sink):
        first, cached = run(loop, sink, "first", BASE)
        assert (first, cached) == (cold(tiny.model, BASE), 0)
        assert run(loop, sink, "exact", BASE) == (first, len(BASE) - 1)
        follow_up = BASE + first + [7, 8, 9]
        assert run(loop, sink, "follow-up", follow_up) == (
            cold(tiny.model, follow_up),
            len(BASE) + 9,  # the last output token was never fed
        )
        assert run(loop, sink, "shorter", BASE[:100]) == (cold(tiny.model, BASE[:100]), 99)
        branch = [*BASE[:120], 5, 6, 7]
        assert run(loop, sink, "branch", branch) == (cold(tiny.model, branch), 120)
        other = list(reversed(BASE))
        assert run(loop, sink, "other", other) == (cold(tiny.model, other), 0)
        counters = loop.counters()
        assert counters["prefix_hits_total"] == 4
        assert counters["prefix_hit_tokens_total"] == 199 + 209 + 99 + 120


def test_hits_of_different_length_in_one_batch(tiny: Any) -> None:
    tails = [[*BASE[:n], 9, 8, 7, n % 500] for n in (70, 90, 120, 199)]
    fresh = [list(reversed(BASE[:60])), [4, 5], [6]]
    want = [cold(tiny.model, prompt) for prompt in tails + fresh]
    with running(tiny.model) as (loop, sink):
        run(loop, sink, "first", BASE)
        assert generate(loop, sink, tails + fresh, 10, "mixed") == want
        got = [sink.cached[f"mixed-{i}"] for i in range(len(want))]
        assert got == [[70], [90], [120], [199], [0], [0], [0]]


def test_memory_stays_within_the_bound(tiny: Any) -> None:
    entry = 210 * 2 * 2 * 2 * 16 * 4  # tokens, layers, keys and values, heads, width, float32
    with running(tiny.model, prompt_cache_bytes=3 * entry) as (loop, sink):
        for i in range(8):
            run(loop, sink, str(i), [3 + i, *BASE])
            assert loop.counters()["prefix_bytes"] <= 3 * entry
        assert 1 <= loop.counters()["prefix_entries"] <= 3
        assert run(loop, sink, "old", [3, *BASE])[1] == 0
        assert run(loop, sink, "new", [3, *BASE])[1] == len(BASE)


def test_an_entry_larger_than_the_bound_evicts_nothing(tiny: Any) -> None:
    entry = 90 * 2 * 2 * 2 * 16 * 4
    with running(tiny.model, prompt_cache_bytes=entry) as (loop, sink):
        run(loop, sink, "small", BASE[:75])
        run(loop, sink, "large", list(reversed(BASE)))
        assert run(loop, sink, "again", BASE[:75])[1] == 74


def test_off(tiny: Any) -> None:
    with running(tiny.model, **NO_CACHE) as (loop, sink):
        for uid in ("first", "again"):
            assert run(loop, sink, uid, BASE)[1] == 0
        assert loop.counters()["prefix_entries"] == 0


def test_a_cache_that_fails_is_done_without(tiny: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """No request fails for an optimisation."""

    def broken(*args: Any) -> Any:
        raise MemoryError("no room")

    where = "smg_grpc_servicer.mlx.runtime.prefix_cache."
    with running(tiny.model) as (loop, sink):
        want = run(loop, sink, "first", BASE)[0]
        with monkeypatch.context() as patch:
            patch.setattr(where + "_first", broken)
            assert run(loop, sink, "no-fetch", BASE) == (want, 0)
        with monkeypatch.context() as patch:
            patch.setattr(where + "launch", broken)
            run(loop, sink, "no-store", list(reversed(BASE)))
        assert loop.counters()["prefix_bytes"] == 0
        assert run(loop, sink, "again", BASE) == (want, 0)
        assert run(loop, sink, "hit", BASE) == (want, len(BASE) - 1)


class Layer:
    """A cache that holds nothing but knows its length."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.nbytes = length

    def is_trimmable(self) -> bool:
        return True

    def trim(self, count: int) -> None:
        self.length -= count

    def merge(self, layers: list[Layer]) -> Layer:
        return layers[0]

    def extract(self, index: int) -> Layer:
        return copy.copy(self)

    def empty(self) -> bool:
        return True


SEQUENCES = st.lists(st.integers(0, 2), max_size=6)


@given(st.lists(SEQUENCES, max_size=12), SEQUENCES, st.integers(120, 800))
def test_the_longest_prefix_is_found(
    stored: list[list[int]], wanted: list[int], bound: int
) -> None:
    """Against a search through everything that was kept."""
    head = list(range(MIN_TOKENS - 2))
    cache = PrefixCache(bound)
    for tail in stored:
        tokens = head + tail
        cache.store(tokens, partial(list, [Layer(len(tokens))]))
    kept = [np.frombuffer(key, dtype=">u4").tolist() for key in cache._entries]
    assert cache._sorted == sorted(cache._entries)
    assert cache.counters()["prefix_bytes"] == sum(map(len, kept)) <= bound
    assert not any(a != b and a == b[: len(a)] for a in kept for b in kept)
    prompt = head + wanted
    common = max(
        (
            next(
                (i for i, (a, b) in enumerate(zip(k, prompt[:-1], strict=False)) if a != b),
                min(len(k), len(prompt) - 1),
            )
            for k in kept
        ),
        default=0,
    )
    found, length = cache.fetch(prompt)
    if common < MIN_TOKENS or len(prompt) <= MIN_TOKENS:
        assert (found, length) == (None, 0)
    else:
        assert length == common
        assert found is not None
        assert found[0].length == length
    assert cache.clear() == len(kept)
    assert cache.fetch(prompt) == (None, 0)
