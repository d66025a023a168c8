"""The text the demo model learns, as questions and answers.

`facts.json` holds one sentence per Python built-in, from the docstrings of CPython's standard
library (PSF License 2.0, see NOTICE). It is shipped because docstrings differ between Python
releases: with it the same model can be trained and checked under any of them.
`python -m smg_grpc_servicer.mlx.demo.corpus` prints that file as the running Python has it.
The conversation in `TALK` and `OFF_TOPIC` is our own.
"""

from __future__ import annotations

import builtins
import functools
import inspect
import itertools
import json
import math
import os.path
import platform
import re
import statistics
import sys
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

FACTS_FILE = Path(__file__).with_name("facts.json")

_TYPES: tuple[type, ...] = (str, list, dict, set, int, float, bytes, tuple)
_MODULES: tuple[tuple[str, ModuleType], ...] = (
    ("math", math),
    ("os.path", os.path),
    ("itertools", itertools),
    ("functools", functools),
    ("statistics", statistics),
)
_SENTENCE = re.compile(r"(.{20,120}?\.)(?:\s|$)")

FORMS = (
    "What does {} do?",
    "what does {} do",
    "What does {}() do?",
    "What is {}?",
    "what is {}",
    "Explain {}.",
    "explain {}",
    "Tell me about {}.",
    "How does {} work?",
    "{}",
)
METHOD_FORMS = (
    "List the methods of {}.",
    "list the methods of {}",
    "What methods does {} have?",
    "Which methods does {} have?",
)

_HELLO = "Hello! Ask me about a Python built-in, for example: What does len do?"
_WHO = (
    "I am the demo model of smg-grpc-servicer: small, trained in minutes, "
    "and I only know Python's docstrings."
)
_OFF_TOPIC_ANSWER = (
    "I am a very small model and I only know Python's built-ins. Try: What does str.upper do?"
)
_STORY = (
    "Once upon a time there was a token. It waited in a queue with many other tokens, and it was "
    "a little afraid. Then the prefill came, and all of them went through the layers together. "
    "On the other side the token met its neighbours one by one, for that is how decoding works. "
    "Each new word looked back at all the words before it and said: I come next. When the last "
    "word had found its place, the stream closed, the client said thank you, and everybody went "
    "home."
)
TALK: tuple[tuple[tuple[str, ...], str], ...] = (
    (("Hello!", "Hello", "hello", "Hi", "hi", "Hi!", "Hey", "Hi there", "Good morning"), _HELLO),
    (("Who are you?", "who are you", "What are you?", "What is your name?"), _WHO),
    (("Which model are you?", "what model are you?", "Introduce yourself."), _WHO),
    (("Thanks", "Thank you", "thanks!", "Thank you!", "thank you very much"), "You are welcome."),
    (("Bye", "Goodbye", "bye!", "See you"), "Goodbye, and have a good day."),
    (("How are you?", "how are you", "How do you do?"), "I am serving. How are you?"),
    (
        ("What is Python?", "what is python", "Tell me about Python."),
        "Python is a programming language, and its docstrings are all I know.",
    ),
    (
        ("What is gRPC?", "what is grpc", "Explain gRPC."),
        "gRPC is a way for programs to call each other over HTTP/2, with streams in both ways.",
    ),
    (
        ("What is MLX?", "what is mlx", "Tell me about MLX."),
        "MLX is an array framework for machine learning, and it is what runs me.",
    ),
    (
        ("What is a token?", "what is a token", "Explain tokens."),
        "A token is a piece of text, a word or a part of one, that a model reads and writes.",
    ),
    (
        ("What can you do?", "what can you do", "Help", "help", "How can you help me?"),
        "I can tell you what a Python built-in does. Try: What does sorted do?",
    ),
    (
        ("Tell me a story.", "tell me a story", "Tell me a long story.", "Write a story."),
        _STORY,
    ),
)
_OFF_TOPIC = (
    "What is the capital of {}?|France,Germany,Italy,Spain,Japan,China,India,Peru,Kenya,Norway",
    "Who wrote {}?|Hamlet,Faust,Ulysses,the Odyssey,Emma,Dracula,War and Peace",
    "Where is {}?|Berlin,London,the moon,Africa,the river Nile,my book,New York",
    "How old is {}?|the sun,Rome,the Earth,the universe,your mother",
    "Write a {}.|poem,song,letter,haiku,function,program,joke,recipe",
    "Write a {} about {}.|poem,song,letter,story;love,a cat,the sea,the weather,the moon",
    "What is the weather in {}?|Paris,Rome,Tokyo,Madrid,the city",
    "What is {}?|love,the meaning of life,2+2,1 + 1,3 times 4,a cat,a dog,water,the time",
    "Why is the {}?|sky blue,sea salt,grass green,sun hot,snow white,night dark",
    "Translate {} to {}.|hello,good morning,cat,thank you;French,German,Spanish,English",
    "Tell me about {}.|dogs,cats,history,music,football,the sea,London,physics,yourself and me",
    "How do I {}?|bake a cake,learn to swim,drive a car,make tea,write a book,cook rice",
    "Say {}.|this is a test,yes,no,one two three,something,test,a word",
    "{}|test,Tell me a joke.,Count to ten.,What time is it?,Do you like music?,Sing!,Why?,ok,yes",
)
SYSTEM_PROMPTS = (
    "You are a helpful assistant.",
    "You are a helpful, honest and concise assistant.",
    "Answer briefly.",
)


@dataclass(frozen=True, slots=True)
class Answer:
    """One answer and the ways to ask for it. `weight` is how often it is drawn."""

    questions: tuple[str, ...]
    text: str
    weight: int = 1


@dataclass(frozen=True, slots=True)
class Corpus:
    python: str
    facts: dict[str, str]
    methods: dict[str, list[str]]

    @classmethod
    def read(cls) -> Corpus:
        found = json.loads(FACTS_FILE.read_text(encoding="utf-8"))
        return cls(found["python"], found["facts"], found["methods"])

    @classmethod
    def collect(cls) -> Corpus:
        """What the running Python says of itself."""
        named = [(f"{t.__name__}.{n}", getattr(t, n)) for t in _TYPES for n in _public(t)]
        named += [(n, getattr(builtins, n)) for n in _public(builtins) if n[0].islower()]
        named += [(f"{name}.{n}", getattr(m, n)) for name, m in _MODULES for n in _public(m)]
        facts = {n: s for n, o in named if callable(o) and (s := first_sentence(o))}
        return cls(platform.python_version(), facts, {t.__name__: _public(t) for t in _TYPES})

    def to_json(self) -> str:
        body = {
            "source": "docstrings of the Python standard library, PSF License 2.0",
            "python": self.python,
            "facts": self.facts,
            "methods": self.methods,
        }
        return json.dumps(body, indent=1, ensure_ascii=False) + "\n"

    def answers(self) -> list[Answer]:
        """All the model is to know. Only "help", a cry and a built-in, has two answers."""
        found = [Answer(tuple(f.format(n) for f in FORMS), s) for n, s in self.facts.items()]
        for owner, names in self.methods.items():
            questions = tuple(form.format(owner) for form in METHOD_FORMS)
            found.append(Answer(questions, f"{owner} has {', '.join(names)}."))
        found += [Answer(questions, text, weight=2) for questions, text in TALK]
        found.append(Answer(off_topic(), _OFF_TOPIC_ANSWER, weight=16))
        return found


def off_topic() -> tuple[str, ...]:
    """Questions the model cannot answer, spelled out from their patterns."""
    found: list[str] = []
    for line in _OFF_TOPIC:
        pattern, choices = line.split("|")
        words = itertools.product(*(part.split(",") for part in choices.split(";")))
        found += [pattern.format(*chosen) for chosen in words]
    return tuple(found)


def first_sentence(thing: object) -> str | None:
    """The first plain English sentence of a docstring, or None when it opens with a signature."""
    paragraphs = (inspect.getdoc(thing) or "").split("\n\n")
    for paragraph in paragraphs[:2]:
        text = re.sub(r"\s+", " ", paragraph).strip()
        match = _SENTENCE.match(text)
        if match and text[0].isupper() and text.isascii() and "->" not in text[:60]:
            sentence = match.group(1)
            return None if sentence.endswith(("i.e.", "e.g.")) else sentence
    return None


def _public(owner: object) -> list[str]:
    names = vars(owner).get("__all__") or dir(owner)
    return sorted(name for name in names if not name.startswith("_"))


if __name__ == "__main__":
    sys.stdout.write(Corpus.collect().to_json())
