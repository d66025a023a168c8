"""Bias and penalties against a plain numpy oracle."""

from __future__ import annotations

import math
from typing import Any

import mlx.core as mx
import numpy as np

from smg_grpc_servicer.core.types import Sampling
from smg_grpc_servicer.mlx.runtime.job import Job, Row, make_row
from smg_grpc_servicer.mlx.runtime.processors import BatchProcessors
from tests.support.mlx_loop import running

VOCAB = 32
SETTINGS = [
    Sampling(),
    Sampling(frequency_penalty=0.5),
    Sampling(presence_penalty=-0.7, logit_bias={3: 4.0, 31: -100.0}),
    Sampling(repetition_penalty=1.3),
    Sampling(repetition_penalty=0.8, frequency_penalty=-0.2, presence_penalty=0.4),
    Sampling(logit_bias={0: 1.5}),
    Sampling(repetition_penalty=1.0),
]


def oracle(logits: Any, row: Row, output: list[int]) -> Any:
    """One row, in float64, straight from the definition."""
    settings = row.job.sampling
    line = logits.astype(np.float64)
    for token, value in settings.logit_bias.items():
        line[token] += value
    repetition = settings.repetition_penalty or 1.0
    for token in set(row.tokens[: row.prompt_length]) | set(output):
        line[token] = line[token] * repetition if line[token] < 0 else line[token] / repetition
    for token in set(output):
        line[token] -= (settings.frequency_penalty or 0.0) * output.count(token)
        line[token] -= settings.presence_penalty or 0.0
    return line


def rows() -> list[Row]:
    chooser = np.random.default_rng(0)
    return [
        make_row(Job(str(i), chooser.integers(0, VOCAB, 5 + i).tolist(), 50, settings), i)
        for i, settings in enumerate(SETTINGS)
    ]


def test_against_the_oracle_over_steps_and_changes_of_membership() -> None:
    """Counts survive rows that join and leave; a pending, unread token counts as well."""
    batch = rows()[:5]
    late = rows()[5:]
    chooser = np.random.default_rng(1)
    outputs: dict[str, list[int]] = {row.uid: [] for row in batch + late}
    inputs = [row.tokens[-1] for row in batch]
    processors = BatchProcessors()
    processors.rebuild(batch, VOCAB)
    for step in range(12):
        if step == 4:
            batch, inputs = batch + late, inputs + [row.tokens[-1] for row in late]
            processors.rebuild(batch, VOCAB)
        if step == 8:
            keep = [0, 2, 3, 4, 6]
            batch, inputs = [batch[i] for i in keep], [inputs[i] for i in keep]
            processors.rebuild(batch, VOCAB)
        logits = (chooser.normal(size=(len(batch), VOCAB)) * 2).astype(np.float32)
        given = mx.array(logits)
        got = np.array(processors.apply(given, mx.array(inputs)))
        assert (np.array(given) == logits).all(), "the caller's logits were changed"
        for i, row in enumerate(batch):
            np.testing.assert_allclose(
                got[i], oracle(logits[i], row, outputs[row.uid]), atol=1e-5, err_msg=row.uid
            )
        # The runtime reads a step's tokens one step later: they are in `tokens` from then on.
        drawn = chooser.integers(0, 6, len(batch)).tolist()
        for row, previous, token in zip(batch, inputs, drawn, strict=True):
            if row.launched:
                row.tokens.append(previous)
            row.launched += 1
            outputs[row.uid].append(token)
        inputs = drawn


def test_nobody_asked_nothing_done() -> None:
    processors = BatchProcessors()
    processors.rebuild([make_row(Job("x", [1], 5), 0)], VOCAB)
    logits = mx.zeros((1, VOCAB))
    assert processors.apply(logits, mx.array([1])) is logits


def test_a_strong_frequency_penalty_never_repeats(tiny: Any, prompts: list[list[int]]) -> None:
    """Over the whole output, not over the last 20 tokens, prompt included (P10)."""
    with running(tiny.model) as (loop, sink):
        once = Sampling(temperature=0, frequency_penalty=1000.0)
        loop.submit(Job("once", prompts[3], 120, once))
        loop.submit(Job("free", prompts[3], 120, Sampling(temperature=0, logit_bias={77: 1e6})))
        sink.ended("once", "free")
    assert len(set(sink.ids["once"])) == 120
    assert set(sink.ids["free"]) == {77}


HUGE = 3.4e38
EXTREMES = {
    "frequency": Sampling(temperature=0, frequency_penalty=-HUGE),
    "all": Sampling(temperature=0, frequency_penalty=HUGE, presence_penalty=HUGE),
    "repetition": Sampling(temperature=0, repetition_penalty=HUGE),
    "tiny repetition": Sampling(temperature=0, repetition_penalty=1e-45),
    "repetition against frequency": Sampling(
        temperature=0, repetition_penalty=1e-45, frequency_penalty=HUGE, presence_penalty=HUGE
    ),
    "bias": Sampling(temperature=0, logit_bias={7: HUGE}),
    "bias and presence": Sampling(
        temperature=0, logit_bias={7: HUGE}, presence_penalty=-HUGE, frequency_penalty=-HUGE
    ),
    "everything biased": Sampling(
        temperature=2e-5, logit_bias=dict.fromkeys(range(512), HUGE), top_p=0.5, min_p=0.5
    ),
    "everything forbidden": Sampling(
        temperature=1, logit_bias=dict.fromkeys(range(512), -HUGE), presence_penalty=HUGE
    ),
}


def test_no_setting_makes_a_logprob_that_is_no_number(tiny: Any, prompts: list[list[int]]) -> None:
    """Penalties and biases as large as float32 goes: an answer that ends well has finite logprobs,
    of all ids, and a neighbour's are what they are alone.
    """
    with running(tiny.model) as (loop, sink):
        loop.submit(Job("alone", prompts[3], 8, Sampling(temperature=0), logprobs=-1))
        sink.ended("alone")
        loop.submit(Job("neighbour", prompts[3], 8, Sampling(temperature=0), logprobs=-1))
        for name, sampling in EXTREMES.items():
            loop.submit(Job(name, prompts[3], 8, sampling, logprobs=-1))
        sink.ended("neighbour", *EXTREMES)
    for name in EXTREMES:
        assert sink.last[name].error is None
        rows = sink.logprobs[name]
        assert len(rows.values) == 8
        flat = [value for row in rows.top_values for value in row]
        assert len(flat) == 8 * 512
        assert all(map(math.isfinite, rows.values + flat)), name
    assert set(sink.ids["bias"]) == {7}
    assert len(set(sink.ids["all"])) == 8
    assert sink.ids["neighbour"] == sink.ids["alone"]
    # A batch of another size sums in another order.
    np.testing.assert_allclose(
        sink.logprobs["neighbour"].top_values, sink.logprobs["alone"].top_values, atol=1e-3
    )
