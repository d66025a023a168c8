"""Log-probabilities against numpy in float64."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache

from smg_grpc_servicer.core.types import LogprobRows, Sampling
from smg_grpc_servicer.mlx.runtime.job import Job, make_row
from smg_grpc_servicer.mlx.runtime.logprobs import BatchLogprobs
from tests.support.mlx_loop import GREEDY, running


def log_softmax(logits: Any) -> Any:
    wide = logits.astype(np.float64)
    wide = wide - wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def check(rows: LogprobRows, place: int, want: Any, token: int, count: int) -> None:
    assert rows.values[place] == pytest.approx(want[token], abs=1e-4)
    assert len(rows.top_ids[place]) == len(rows.top_values[place]) == count
    order = np.argsort(-want, kind="stable")[:count]
    assert rows.top_ids[place] == order.tolist()
    np.testing.assert_allclose(rows.top_values[place], want[order], atol=1e-4)
    assert rows.top_values[place] == sorted(rows.top_values[place], reverse=True)


def test_each_row_gets_what_it_asked_for() -> None:
    asked = [None, 0, 1, 5, -1, 64, 1000, 40, None]
    rows = [make_row(Job(str(i), [1], 1, logprobs=n), i) for i, n in enumerate(asked)]
    logits = mx.random.normal((len(asked), 64), key=mx.random.key(0)) * 5
    tokens = list(range(len(asked)))
    batch = BatchLogprobs()
    batch.rebuild(rows, 64)
    pending = batch.keep(logits)
    assert pending is not None
    got = pending.read(tokens)
    want = log_softmax(np.array(logits))
    assert sorted(got) == [1, 2, 3, 4, 5, 6, 7]
    for i, count in ((1, 0), (2, 1), (3, 5), (4, 64), (5, 64), (6, 64), (7, 40)):
        check(got[i], 0, want[i], i, count)


def test_nobody_asked_nothing_computed() -> None:
    batch = BatchLogprobs()
    batch.rebuild([make_row(Job("x", [1], 1), 0)], 64)
    assert batch.keep(mx.zeros((1, 64))) is None


def test_every_token_has_its_own(tiny: Any, prompts: list[list[int]]) -> None:
    """As many rows as tokens (E6), of the model's distribution before temperature and filters."""
    prompt = prompts[4]
    with running(tiny.model) as (loop, sink):
        for i in range(4):
            loop.submit(Job(f"other-{i}", prompts[i], 12, GREEDY, logprobs=[None, 2][i % 2]))
        hot = Sampling(temperature=1.7, top_k=30, seed=1)
        loop.submit(Job("asked", prompt, 12, hot, logprobs=5))
        sink.ended("asked", *(f"other-{i}" for i in range(4)))
    rows = sink.logprobs["asked"]
    assert len(rows) == len(sink.ids["asked"]) == 12
    assert set(sink.logprobs) == {"asked", "other-1", "other-3"}
    logits = tiny.model(mx.array([prompt + sink.ids["asked"]]), cache=make_prompt_cache(tiny.model))
    want = log_softmax(np.array(logits[0].astype(mx.float32)))[len(prompt) - 1 :]
    for place, token in enumerate(sink.ids["asked"]):
        check(rows, place, want[place], token, 5)


def test_they_are_taken_after_the_bias(tiny: Any, prompts: list[list[int]]) -> None:
    with running(tiny.model) as (loop, sink):
        biased = Sampling(temperature=0, logit_bias={9: 1000.0})
        loop.submit(Job("biased", prompts[4], 2, biased, logprobs=1))
        sink.ended("biased")
    assert sink.ids["biased"] == [9, 9]
    assert sink.logprobs["biased"].values == pytest.approx([0.0, 0.0], abs=1e-6)
