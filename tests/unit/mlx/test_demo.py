"""The demo model as a package resource: what can be said of it without mlx."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from smg_grpc_servicer.mlx import demo
from smg_grpc_servicer.mlx.demo.corpus import Corpus, first_sentence, off_topic
from smg_grpc_servicer.mlx.demo.train import main

LIMIT_BYTES = 2_000_000
MODEL_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


def test_the_model_directory_holds_the_model_and_nothing_else() -> None:
    """A server bundles this directory for its clients: no code, no training text in it."""
    assert {entry.name for entry in demo.path().iterdir()} == MODEL_FILES


def test_all_that_ships_fits_the_size_it_was_promised() -> None:
    room = demo.path().parent
    shipped = [f for f in room.rglob("*") if f.is_file() and "__pycache__" not in f.parts]
    assert sum(f.stat().st_size for f in shipped) <= LIMIT_BYTES


def test_configuration_names_the_context_and_the_ends_of_an_answer() -> None:
    config = json.loads((demo.path() / "config.json").read_text())
    tokens = json.loads((demo.path() / "tokenizer.json").read_text())["added_tokens"]
    ids = {token["content"]: token["id"] for token in tokens}
    assert config["max_position_embeddings"] == 2048
    assert config["eos_token_id"] == [ids["<|im_end|>"], ids["<|endoftext|>"]]
    generation = json.loads((demo.path() / "generation_config.json").read_text())
    assert generation["eos_token_id"] == config["eos_token_id"]


def test_there_are_twenty_examples_and_each_question_is_asked_once() -> None:
    found = demo.examples()
    assert len(found) == 20
    assert len({example.question for example in found}) == 20
    assert all(example.answer.endswith((".", "?")) for example in found)


def test_every_example_is_in_the_training_text() -> None:
    taught = {q: answer.text for answer in Corpus.read().answers() for q in answer.questions}
    assert {e.question: e.answer for e in demo.examples()}.items() <= taught.items()


def test_no_question_but_a_cry_for_help_has_two_answers() -> None:
    """Else the model could not be exact, however long it trained."""
    asked = Counter(q for answer in Corpus.read().answers() for q in answer.questions)
    assert {question for question, times in asked.items() if times > 1} == {"help"}


def test_the_running_python_still_yields_facts() -> None:
    assert len(Corpus.collect().facts) > 200


@pytest.mark.parametrize(
    ("docstring", "sentence"),
    [
        ("Return the length of things.  And more.", "Return the length of things."),
        ("f(x) -> y\n\nReturn the y of\nan x. More.", "Return the y of an x."),
        ("f(x) -> y, and nothing that reads as English.", None),
        ("Too short.", None),
        ("Return a thing in a few words, i.e. with more.", None),
        (None, None),
    ],
)
def test_first_sentence(docstring: str | None, sentence: str | None) -> None:
    class Documented:
        __slots__ = ()

    Documented.__doc__ = docstring
    assert first_sentence(Documented) == sentence


def test_patterns_of_off_topic_questions_are_spelled_out() -> None:
    found = off_topic()
    assert "Write a poem about the sea." in found
    assert not [question for question in found if "{" in question or "|" in question]


def test_notice_names_the_text_its_licence_and_the_command() -> None:
    notice = (demo.path().parent / "NOTICE").read_text()
    assert "PYTHON SOFTWARE FOUNDATION LICENSE VERSION 2" in notice
    assert f"CPython {Corpus.read().python}" in notice
    assert "python -m smg_grpc_servicer.mlx.demo.train --out" in notice


def test_asking_for_the_path_loads_no_engine() -> None:
    """`--help` and the command line name the demo model on machines without mlx."""
    code = (
        "import sys; from smg_grpc_servicer.mlx import demo; demo.path(); demo.examples();"
        "import smg_grpc_servicer.mlx.demo.train;"
        "print([m for m in sys.modules if m.split('.')[0] in ('mlx', 'mlx_lm', 'tokenizers')])"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    ran = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment
    )
    assert ran.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "--out --check"),
        (["--out", "x", "--seconds", "-1"], "allowed: 0 or more seconds"),
        (["--out", "x", "--seconds", "nan"], "allowed: 0 or more seconds"),
        (["--out", "x", "--steps", "-1"], "allowed: 0 or more"),
        (["--check", "--facts", "0"], "allowed: 1 or more"),
    ],
)
def test_bad_arguments_exit_2_and_say_why(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert said in capsys.readouterr().err
