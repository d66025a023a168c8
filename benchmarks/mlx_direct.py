"""mlx-lm's own BatchGenerator, driven without any server: the yardstick of `mlx_engine.py`.

Reads JSON lines on standard input ({"rows": 8, "tokens": 64, "temperature": 0}), answers each with
output tokens a second. Same BLAS, dtype and compile setting as ours.
"""

from __future__ import annotations

import json
import sys
from time import perf_counter
from typing import Any

from smg_grpc_servicer.mlx import backend


def main() -> None:
    chosen = backend.prepare()
    from mlx_lm.generate import BatchGenerator
    from mlx_lm.sample_utils import make_sampler

    from smg_grpc_servicer.mlx import model as models

    loaded = models.load(sys.argv[1], dtype=chosen.dtype)
    print(json.dumps({"ready": chosen.describe()}), flush=True)
    for line in sys.stdin:
        wish: dict[str, Any] = json.loads(line)
        generator = BatchGenerator(loaded.model, completion_batch_size=32, prefill_batch_size=8)
        samplers = None
        if wish["temperature"]:
            samplers = [make_sampler(temp=wish["temperature"]) for _ in wish["prompts"]]
        start = perf_counter()
        generator.insert(
            wish["prompts"], max_tokens=[wish["tokens"]] * len(wish["prompts"]), samplers=samplers
        )
        made = 0
        while made < wish["tokens"] * len(wish["prompts"]):
            made += len(generator.next_generated())
        print(json.dumps({"rate": made / (perf_counter() - start)}), flush=True)
        generator.close()


if __name__ == "__main__":
    main()
