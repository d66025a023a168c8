"""Greedy output is mlx-lm's own, however requests are mixed."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import pytest
from mlx_lm.generate import generate_step
from mlx_lm.models import llama, mamba2

from smg_grpc_servicer.mlx.runtime.job import Job
from tests.support.mlx_loop import GREEDY, generate, running

TOKENS = 24


def reference(model: Any, prompt: list[int], tokens: int = TOKENS) -> list[int]:
    return [int(t) for t, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]


@pytest.fixture(scope="module")
def expected(tiny: Any, prompts: list[list[int]]) -> list[list[int]]:
    return [reference(tiny.model, prompt) for prompt in prompts]


def test_alone(tiny: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    with running(tiny.model) as (loop, sink):
        got = [
            generate(loop, sink, [prompt], TOKENS, f"alone-{i}")[0]
            for i, prompt in enumerate(prompts)
        ]
    assert got == expected


def test_in_batches_of_eight(
    tiny: Any, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    with running(tiny.model, completion_batch_size=8) as (loop, sink):
        assert generate(loop, sink, prompts, TOKENS, "batch") == expected


def test_staggered_arrivals(tiny: Any, prompts: list[list[int]], expected: list[list[int]]) -> None:
    """A row that joins in the middle of a decode leaves the others' positions alone (E1)."""
    with running(tiny.model) as (loop, sink):
        for i, prompt in enumerate(prompts[:8]):
            loop.submit(Job(str(i), prompt, TOKENS, GREEDY))
            sink.tokens(str(i), 2)
        sink.ended(*(str(i) for i in range(8)))
        assert [sink.ids[str(i)] for i in range(8)] == expected[:8]


def test_chunked_prefill(tiny: Any) -> None:
    long = [3 + (i * 31) % 500 for i in range(300)]
    want = reference(tiny.model, long)
    for budget in (7, 64, 299, 300, 1000):
        with running(
            tiny.model, prefill_budget=budget, idle_prefill_budget=budget, prompt_cache_bytes=0
        ) as (loop, sink):
            assert generate(loop, sink, [long], TOKENS, "long") == [want]


@pytest.fixture(scope="module")
def sliding() -> Any:
    mx.random.seed(3)
    config = {
        "model_type": "llama",
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_attention_heads": 2,
        "rms_norm_eps": 1e-5,
        "vocab_size": 128,
        "layer_types": ["sliding_attention", "full_attention"],
        "sliding_window": 16,
    }
    model = llama.Model(llama.ModelArgs.from_dict(config))
    mx.eval(model.parameters())
    return model


@pytest.fixture(scope="module")
def recurrent() -> Any:
    mx.random.seed(4)
    args = mamba2.ModelArgs.from_dict(
        {
            "model_type": "mamba2",
            "num_heads": 4,
            "head_dim": 16,
            "vocab_size": 128,
            "hidden_size": 32,
            "intermediate_size": 64,
            "state_size": 8,
            "num_hidden_layers": 2,
            "layer_norm_epsilon": 1e-5,
            "conv_kernel": 4,
            "n_groups": 1,
            "use_bias": False,
            "use_conv_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": (0.001, 100.0),
            "time_step_rank": 4,
        }
    )
    model = mamba2.Model(args)
    mx.eval(model.parameters())
    return model


@pytest.mark.parametrize("kind", ["sliding", "recurrent"])
def test_other_kinds_of_cache(kind: str, request: pytest.FixtureRequest) -> None:
    """Rotating windows and recurrent states, past their windows and joined mid-decode."""
    model = request.getfixturevalue(kind)
    prompts = [[1 + (i * 7 + j) % 120 for j in range(3 + 9 * i)] for i in range(4)]
    want = [reference(model, prompt) for prompt in prompts]
    with running(model, prefill_budget=16) as (loop, sink):
        assert generate(loop, sink, prompts, TOKENS, "together") == want
        for i, prompt in enumerate(prompts):
            loop.submit(Job(str(i), prompt, TOKENS, GREEDY))
            sink.tokens(str(i), 1)
        sink.ended("0", "1", "2", "3")
        assert [sink.ids[str(i)] for i in range(4)] == want


def test_a_stop_id_is_kept_and_wins_over_the_length(tiny: Any, prompts: list[list[int]]) -> None:
    want = reference(tiny.model, prompts[5])
    place = next(i for i in range(3, TOKENS) if want[i] not in want[:i])
    with running(tiny.model) as (loop, sink):
        stop = frozenset({want[place]})
        loop.submit(Job("early", prompts[5], TOKENS, GREEDY, stop))
        loop.submit(Job("both", prompts[5], place + 1, GREEDY, stop))
        loop.submit(Job("length", prompts[5], place, GREEDY, stop))
        sink.ended("early", "both", "length")
    for uid in ("early", "both"):
        finish = sink.last[uid].finish
        assert finish is not None
        assert (finish.reason, finish.matched) == ("stop", want[place])
        assert sink.ids[uid] == want[: place + 1]
    finish = sink.last["length"].finish
    assert finish is not None
    assert (finish.reason, finish.matched) == ("length", None)
    assert sink.ids["length"] == want[:place]
