"""What vLLM itself says: `python -m tests.support.vllm_oracle MODEL EMBEDDER OUT.json`.

One process for all of it, because importing vLLM is most of the time. The JSON has

- `answers`, by the name of each of `vllm_cases.CASES`: a list of choices (token ids, finish reason,
  stop reason, logprobs as a list of {token id: [value, rank]}), and the prompt's logprobs
- `vectors` of the prompts of `embedding_model`
- `parsed`: see `vllm_command_line`
"""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path
from typing import Any

from tests.support import embedding_model, vllm_command_line
from tests.support.real_vllm import CONSTRAINTS, CONTEXT, SEQUENCES
from tests.support.vllm_cases import CASES, GREEDY, Case


def main() -> None:
    model, embedder, out = sys.argv[1:]
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    said = {
        "answers": completions(model),
        "vectors": vectors(embedder),
        "parsed": vllm_command_line.parsed(),
    }
    Path(out).write_text(json.dumps(said))


def engine(model: str, **options: Any) -> Any:
    """An engine in this process."""
    from vllm import LLM

    return LLM(
        model=model,
        max_num_seqs=SEQUENCES,
        enforce_eager=True,
        dtype="float32",
        distributed_executor_backend="uni",
        **options,
    )


def vectors(model: str) -> list[list[float]]:
    prompts: Any = [{"prompt_token_ids": ids} for ids in embedding_model.prompts(Path(model))]
    outputs = engine(model, runner="pooling").embed(prompts, use_tqdm=False)
    return [output.outputs.embedding for output in outputs]


def completions(model: str) -> dict[str, Any]:
    llm = engine(
        model,
        max_model_len=CONTEXT,
        max_logprobs=-1,
        structured_outputs_config=CONSTRAINTS,
    )
    prompts: Any = [{"prompt_token_ids": case.prompt} for case in CASES.values()]
    outputs = llm.generate(prompts, [_params(c) for c in CASES.values()], use_tqdm=False)
    answers = {name: _answer(output) for name, output in zip(CASES, outputs, strict=True)}
    return answers | _stops(llm, answers)


def _stops(llm: Any, answers: dict[str, Any]) -> dict[str, Any]:
    """The first greedy case that has a word in its output, stopped by it."""
    words = {
        name: found[0]
        for name in GREEDY
        if (found := re.search("(?<=.)[a-z]{3,}", answers[name]["choices"][0]["text"]))
    }
    name, word = next(iter(words.items()))
    case = GREEDY[name]
    stopped = {}
    for include in (False, True):
        sampling = case.sampling | {
            "stop": [word], "include_stop_str_in_output": include, "ignore_eos": False
        }  # fmt: skip
        (output,) = llm.generate(
            [{"prompt_token_ids": case.prompt}],
            _params(Case(case.prompt, sampling)),
            use_tqdm=False,
        )
        answer = {"prompt": case.prompt, "sampling": sampling, **_answer(output)}
        stopped["stop string included" if include else "stop string"] = answer
    return stopped


def _params(case: Case) -> Any:
    from vllm import SamplingParams
    from vllm.sampling_params import StructuredOutputsParams

    given = dict(case.sampling)
    if case.constraint:
        ((kind, value),) = case.constraint.items()
        kind = {"json_schema": "json"}.get(kind, kind)
        given["structured_outputs"] = StructuredOutputsParams(**{kind: value})
    return SamplingParams(**given)


def _answer(output: Any) -> dict[str, Any]:
    return {
        "choices": [
            {
                "ids": list(choice.token_ids),
                "finish": choice.finish_reason,
                "stop": choice.stop_reason,
                "text": choice.text,
                "logprobs": _rows(choice.logprobs),
            }
            for choice in output.outputs
        ],
        "prompt_logprobs": _rows(output.prompt_logprobs),
    }


def _rows(logprobs: Any) -> list[dict[int, list[float]] | None] | None:
    if logprobs is None:
        return None
    return [
        None if not row else {token: [e.logprob, e.rank] for token, e in row.items()}
        for row in logprobs
    ]


if __name__ == "__main__":
    main()
