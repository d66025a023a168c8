"""The batch sampler: mlx-lm's filters row by row, the right distribution, seeds that hold."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.sample_utils import apply_min_p, apply_top_k, apply_top_p

from smg_grpc_servicer.core.types import Sampling
from smg_grpc_servicer.mlx.runtime.job import Job, Row, make_row
from smg_grpc_servicer.mlx.runtime.sampler import BatchSampler
from tests.support.mlx_loop import GREEDY, running

VOCAB = 200


def row(**sampling: Any) -> Row:
    return make_row(Job("x", [1], 10, Sampling(**sampling)), 0)


def draw(sampler: BatchSampler, logits: Any) -> list[int]:
    tokens: Any = sampler(logits).tolist()
    return list(tokens)


def sampler_for(rows: list[Row], vocab: int = VOCAB) -> BatchSampler:
    sampler = BatchSampler()
    sampler.rebuild(rows, vocab)
    return sampler


FILTERS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.9},
    {"top_p": 0.3, "top_k": 50},
    {"min_p": 0.05},
    {"min_p": 0.2, "top_p": 0.8, "top_k": 5},
    {"top_k": 1},
    {"top_k": 199},
    {"top_k": 200},
    {"top_p": 1.0, "min_p": 0.0},
    {"top_p": 0.0},
    {"min_p": 1.0},
]


@pytest.mark.parametrize("only_top_k", [False, True])
def test_filters_keep_what_mlx_lm_keeps(only_top_k: bool) -> None:
    settings = [f for f in FILTERS if 0 < f.get("top_k", 0) < VOCAB] if only_top_k else FILTERS
    logits = mx.random.normal((len(settings), VOCAB), key=mx.random.key(1)) * 3
    sampler = sampler_for([row(**f) for f in settings])
    kept = np.array(sampler._filter(logits)) > -np.inf
    for i, chosen in enumerate(settings):
        line = logits[i : i + 1]
        line = line - mx.logsumexp(line, axis=-1, keepdims=True)
        if 0 < chosen.get("top_p", 0) < 1:
            line = apply_top_p(line, chosen["top_p"])
        if chosen.get("min_p"):
            line = apply_min_p(line, chosen["min_p"])
        if 0 < chosen.get("top_k", 0) < VOCAB:
            line = apply_top_k(line, chosen["top_k"])
        assert (kept[i] == (np.array(line)[0] > -np.inf)).all(), chosen


def test_unfiltered_rows_of_a_mixed_batch_keep_their_logits() -> None:
    logits = mx.random.normal((3, VOCAB), key=mx.random.key(2))
    before = np.array(logits)
    cut = np.array(sampler_for([row(), row(top_k=3), row()])._filter(logits))
    assert (cut[[0, 2]] == before[[0, 2]]).all()
    assert (cut[1] > -np.inf).sum() == 3
    assert (np.array(logits) == before).all()


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_distribution(temperature: float) -> None:
    """Chi-square over 6,400 draws with fixed seeds; 24.3 is the 0.1 % point at 7 degrees."""
    logits = np.array([1.0, 0.5, 0.0, -0.5, -1.0, 2.0, 1.5, -2.0], dtype=np.float32)
    rows = [row(temperature=temperature, seed=i) for i in range(64)]
    sampler = sampler_for(rows, 8)
    batch = mx.array(np.tile(logits, (64, 1)))
    drawn = np.concatenate([np.array(sampler(batch)) for _ in range(100)])
    odds = np.exp(logits / temperature)
    expected = odds / odds.sum() * drawn.size
    found = np.bincount(drawn, minlength=8)
    assert ((found - expected) ** 2 / expected).sum() < 24.3


def test_filtered_distribution() -> None:
    """top_k cuts first, then temperature shapes what is left."""
    logits = np.array([3.0, 2.0, 1.0, 0.0, -1.0], dtype=np.float32)
    rows = [row(temperature=2.0, top_k=2, seed=i) for i in range(64)]
    sampler = sampler_for(rows, 5)
    batch = mx.array(np.tile(logits, (64, 1)))
    drawn = np.concatenate([np.array(sampler(batch)) for _ in range(50)])
    assert set(drawn.tolist()) == {0, 1}
    share = (drawn == 0).mean()
    assert share == pytest.approx(1 / (1 + np.exp(-0.5)), abs=0.03)


@pytest.mark.parametrize("temperature", [0.0, 1e-6, 9e-6])
def test_zero_and_tiny_temperatures_are_greedy(temperature: float) -> None:
    logits = mx.random.normal((4, VOCAB), key=mx.random.key(5))
    rows = [row(temperature=temperature), row(seed=1), row(temperature=temperature), row()]
    tokens: Any = sampler_for(rows)(logits).tolist()
    best: Any = mx.argmax(logits, axis=-1).tolist()
    assert [tokens[0], tokens[2]] == [best[0], best[2]]


def test_low_temperature_does_not_overflow() -> None:
    logits = mx.random.normal((1, VOCAB), key=mx.random.key(5)) * 30
    tokens = sampler_for([row(temperature=1e-4, seed=1)])(logits)
    assert tokens.tolist() == mx.argmax(logits, axis=-1).tolist()


def test_noise_depends_on_seed_and_position_only() -> None:
    logits = mx.random.normal((1, VOCAB), key=mx.random.key(6))
    alone = sampler_for([row(seed=11)])
    want = [draw(alone, logits)[0] for _ in range(12)]
    assert len(set(want)) > 3
    others = [row(seed=11), row(seed=12), row(), row(temperature=0.0)]
    mixed = sampler_for(others)
    got = []
    for step in range(12):
        if step == 5:
            # Membership changes: the row moves and its position comes from `launched`.
            others = [row(top_p=0.5), others[3], others[0]]
            others[2].launched = step
            mixed.rebuild(others, VOCAB)
        place = 0 if step < 5 else 2
        got.append(draw(mixed, mx.broadcast_to(logits, (len(others), VOCAB)))[place])
    assert got == want


def test_neighbouring_seeds_do_not_share_a_stream() -> None:
    logits = mx.zeros((1, VOCAB))
    streams = []
    for seed in (5, 6):
        sampler = sampler_for([row(seed=seed)])
        streams.append([draw(sampler, logits)[0] for _ in range(20)])
    assert streams[0][1:] != streams[1][:-1]
    assert streams[0] != streams[1]


@pytest.mark.parametrize("seed", [-1, 0, 2**31, 2**63, 2**64 + 5])
def test_any_seed_is_taken(seed: int) -> None:
    logits = mx.zeros((1, VOCAB))
    first = [sampler_for([row(seed=seed)])(logits).tolist() for _ in range(2)]
    assert first[0] == first[1]


def test_seeds_reproduce_alone_again_and_in_a_mixed_batch(
    tiny: Any, prompts: list[list[int]]
) -> None:
    """The peer's seed did nothing (P4): here one seed is one text, whoever runs beside it."""
    seeded = Sampling(temperature=1.0, seed=42, top_p=0.95)
    with running(tiny.model) as (loop, sink):
        for uid in ("alone", "again"):
            loop.submit(Job(uid, prompts[6], 30, seeded))
            sink.ended(uid)
        for i, prompt in enumerate(prompts[:7]):
            mixed = GREEDY if i % 2 else Sampling(temperature=0.7, top_k=20)
            loop.submit(Job(f"other-{i}", prompt, 10 + 5 * i, mixed))
            if i == 3:
                loop.submit(Job("mixed", prompts[6], 30, seeded))
        loop.submit(Job("neighbour", prompts[6], 30, Sampling(temperature=1.0, seed=43)))
        loop.submit(Job("unseeded", prompts[6], 30, Sampling(temperature=1.0)))
        sink.ended("mixed", "neighbour", "unseeded", *(f"other-{i}" for i in range(7)))
    assert sink.ids["alone"] == sink.ids["again"] == sink.ids["mixed"]
    assert len({tuple(sink.ids[u]) for u in ("alone", "neighbour", "unseeded")}) == 3
