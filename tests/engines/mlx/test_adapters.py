"""Other weights: a LoRA adapter, float16."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from smg_grpc_servicer.testing.history import check
from tests.engines.mlx.conftest import CONTEXT
from tests.support.mlx_client import VOCAB, Client, connected, random_prompt
from tests.support.servers import serving
from tests.support.tiny_mlx import write_tiny_model

PROMPTS = [random_prompt(4 + i, seed=70) for i in range(6)]


def write_adapter(model_path: Path, path: Path) -> Path:
    """Low-rank noise on every layer, in the files `mlx_lm.load` reads."""
    import mlx.core as mx
    import mlx_lm
    from mlx.utils import tree_flatten, tree_map_with_path
    from mlx_lm.tuner.utils import linear_to_lora_layers

    model: Any = mlx_lm.load(str(model_path))[0]
    model.freeze()
    settings = {"rank": 4, "scale": 8.0, "dropout": 0.0}
    linear_to_lora_layers(model, 2, settings)
    mx.random.seed(1)
    model.update(
        tree_map_with_path(
            lambda name, w: mx.random.normal(w.shape) * 0.3 if "lora" in name else w,
            model.trainable_parameters(),
        )
    )
    path.mkdir()
    mx.save_safetensors(
        str(path / "adapters.safetensors"), dict(tree_flatten(model.trainable_parameters()))
    )
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": settings}
    (path / "adapter_config.json").write_text(json.dumps(config))
    return path


def own_greedy(model_path: Path, adapter: Path | None, tokens: int) -> list[list[int]]:
    """What mlx-lm itself generates."""
    import mlx.core as mx
    import mlx_lm
    from mlx_lm.generate import generate_step

    model = mlx_lm.load(str(model_path), adapter_path=adapter and str(adapter))[0]
    return [
        [int(token) for token, _ in generate_step(mx.array(prompt), model, max_tokens=tokens)]
        for prompt in PROMPTS
    ]


async def greedy(client: Client, tokens: int) -> list[list[int]]:
    histories = await client.together([client.request(p, max_tokens=tokens) for p in PROMPTS])
    assert [check(h) for h in histories] == [[]] * len(PROMPTS)
    return [h.streamed_ids() for h in histories]


async def test_an_adapter_is_served_as_mlx_lm_runs_it(
    noise_client: Client, noise_path: Path, tmp_path: Path
) -> None:
    """`--adapter-path`: other than the base model's text, and exactly mlx-lm's own."""
    from smg_grpc_servicer.mlx import backend

    backend.prepare()
    adapter = write_adapter(noise_path, tmp_path / "adapter")
    base = await greedy(noise_client, 24)
    assert base == own_greedy(noise_path, None, 24)
    async with (
        serving("--model", str(noise_path), "--adapter-path", str(adapter)) as server,
        connected(server.address) as client,
    ):
        adapted = await greedy(client, 24)
    assert all(mine != plain for mine, plain in zip(adapted, base, strict=True))
    assert adapted == own_greedy(noise_path, adapter, 24)


async def test_float16_weights_are_served_with_float32_logprobs(tmp_path: Path) -> None:
    """P8: `--dtype float16` serves; whole rows still sum to one, in float32."""
    path = write_tiny_model(tmp_path / "half", vocab=VOCAB, ctx=CONTEXT, dtype="float16")
    async with serving("--model", str(path), "--dtype", "float16") as server:
        assert "weights float16" in server.log
        async with connected(server.address) as client:
            history = await client.generate(PROMPTS[0], logprobs=-1, max_tokens=12)
            assert check(history, logprobs=VOCAB) == []
            for chunk in history.chunks:
                for row in chunk.output_logprobs.top_logprobs:
                    total = math.fsum(map(math.exp, row.values))
                    assert total == pytest.approx(1, abs=1e-5)
            warm = await client.generate(PROMPTS[1], temperature=1e-6, max_tokens=12)
            cold = await client.generate(PROMPTS[1], max_tokens=12)
            assert warm.code is grpc.StatusCode.OK
            assert warm.streamed_ids() == cold.streamed_ids()
