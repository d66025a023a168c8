"""The demo model under real mlx-lm: it says what it is meant to say."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from smg_grpc_servicer.mlx import demo
from smg_grpc_servicer.mlx.backend import load_blas
from smg_grpc_servicer.mlx.demo.corpus import Corpus, off_topic
from smg_grpc_servicer.mlx.demo.train import main

load_blas()
import mlx.core as mx  # noqa: E402 - after BLAS
import mlx_lm  # noqa: E402

from smg_grpc_servicer.mlx.demo.chat import render  # noqa: E402
from smg_grpc_servicer.mlx.demo.check import misses, questions, reply  # noqa: E402


@pytest.fixture(scope="module", params=["float16", "float32"])
def loaded(request: pytest.FixtureRequest) -> tuple[Any, Any]:
    model, tokenizer = mlx_lm.load(str(demo.path()))[:2]
    model.set_dtype(getattr(mx, request.param))
    return model, tokenizer


def test_every_example_is_answered_word_for_word(loaded: tuple[Any, Any]) -> None:
    model, tokenizer = loaded
    got = {e.question: reply(model, tokenizer, e.question) for e in demo.examples()}
    assert got == {e.question: e.answer for e in demo.examples()}


def test_an_answer_is_the_same_after_other_turns_and_under_a_system_prompt(
    loaded: tuple[Any, Any],
) -> None:
    model, tokenizer = loaded
    first, *others = demo.examples()[:6]
    messages = [{"role": "system", "content": "You are a helpful assistant."}]
    for example in others:
        messages.append({"role": "user", "content": example.question})
        messages.append({"role": "assistant", "content": example.answer})
    messages.append({"role": "user", "content": first.question})
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
    assert mlx_lm.generate(model, tokenizer, prompt, max_tokens=60) == first.answer


@pytest.mark.parametrize(
    "question",
    [
        "What is the capital of Portugal?",
        "Which song do you sing in the morning?",
        "Write a short story about Paris",
    ],
)
def test_a_question_it_was_never_taught_gets_a_polite_refusal(
    loaded: tuple[Any, Any], question: str
) -> None:
    answers = Corpus.read().answers()
    assert question not in {q for answer in answers for q in answer.questions}
    (refusal,) = {a.text for a in answers if off_topic()[0] in a.questions}
    assert reply(*loaded, question) == refusal


def test_facts_at_large_are_exact() -> None:
    asked = questions(Corpus.read(), 25, random.Random(1))
    assert list(misses(demo.path(), asked)) == []


def test_the_shipped_template_reads_as_the_model_was_trained() -> None:
    tokenizer = mlx_lm.load(str(demo.path()))[1]
    turns = [("system", "Answer briefly."), ("user", "Hi"), ("assistant", "Hello."), ("user", "é?")]
    messages = [{"role": role, "content": text} for role, text in turns]
    shown = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert shown == "".join(render(*turn) for turn in turns) + "<|im_start|>assistant\n"


def test_training_writes_a_model_that_loads_and_fails_its_check(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--out", str(tmp_path), "--steps", "2", "--facts", "2"]) == 1
    said = capsys.readouterr().out
    assert "step 2, loss" in said
    assert "0 of 2 facts answered exactly" in said
    fresh, shipped = (json.loads((d / "config.json").read_text()) for d in (tmp_path, demo.path()))
    assert fresh == shipped


def test_the_same_seed_gives_the_same_weights(tmp_path: Path) -> None:
    files = []
    for name, seed in (("one", "3"), ("two", "3"), ("three", "4")):
        assert main(["--out", str(tmp_path / name), "--steps", "0", "--seed", seed]) == 0
        files.append((tmp_path / name / "model.safetensors").read_bytes())
    assert files[0] == files[1]
    assert files[0] != files[2]
