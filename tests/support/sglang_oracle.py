"""SGLang's own offline answers: `python -m tests.support.sglang_oracle OUT.json LLAMA QWEN3`.

The JSON has, by model and by the name of each of `sglang_cases.CASES`, what `Engine.generate` gave:
`ids`, `finish`, and where they were asked for the output's and the prompt's logprobs.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from tests.support.sglang_cases import CASES, GREEDY, Case

NAMES = {
    "max_tokens": "max_new_tokens",
    "min_tokens": "min_new_tokens",
    "grammar": "ebnf",
}


def offline(model: str, **more: Any) -> Any:
    """SGLang's own Engine on a CPU."""
    import sglang

    return sglang.Engine(
        model_path=model,
        device="cpu",
        attention_backend="torch_native",
        dtype="float32",
        mem_fraction_static=0.1,
        max_total_tokens=8192,
        page_size=4,
        **more,
    )


def answers(model: str, cases: dict[str, Case]) -> dict[str, Any]:
    engine = offline(
        model, grammar_backend="xgrammar", constrained_json_disable_any_whitespace=True
    )
    try:
        return {name: _answer(engine, case) for name, case in cases.items()}
    finally:
        engine.shutdown()


def _answer(engine: Any, case: Case) -> dict[str, Any]:
    sampling = {NAMES.get(name, name): value for name, value in case.sampling.items()}
    if "logit_bias" in sampling:
        sampling["logit_bias"] = {str(k): v for k, v in sampling["logit_bias"].items()}
    more: dict[str, Any] = {}
    if case.logprobs is not None:
        more = {"return_logprob": True, "top_logprobs_num": case.logprobs, "logprob_start_len": 0}
    found = engine.generate(input_ids=case.prompt, sampling_params=sampling, **more)
    meta = found["meta_info"]
    answer = {"ids": found["output_ids"], "finish": meta["finish_reason"]["type"]}
    for name in ("output_token_logprobs", "input_token_logprobs", "output_top_logprobs"):
        if meta.get(name):
            answer[name] = meta[name]
    return answer


def main() -> None:
    out, llama, qwen3 = sys.argv[1:]
    found = {"llama": answers(llama, CASES), "qwen3": answers(qwen3, GREEDY)}
    Path(out).write_text(json.dumps(found))


if __name__ == "__main__":
    main()
