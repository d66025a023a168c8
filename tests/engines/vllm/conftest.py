"""A stubbed `vllm` of each release, around that release's own launcher files; a tiny real model."""

from __future__ import annotations

import asyncio
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import ROOT, Child
from tests.support.embedding_model import minilm
from tests.support.real_vllm import run_module
from tests.support.vllm_wheels import tree

Start = Callable[..., AbstractContextManager[Child]]

FORMS = {
    "serve": ("tests.support.vllm_stub", "serve", "stub-model", "--grpc"),
    "launcher": ("vllm.entrypoints.launchers.grpc_server",),
    "old-name": ("vllm.entrypoints.grpc_server",),
}
"""How a launcher is entered: the module that is run, and what comes first on its command line."""


@pytest.fixture(scope="session")
def trees(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The `vllm` of a release, with our entry point beside it as an installer would put it."""
    made: dict[str, Path] = {}
    project = (ROOT / "pyproject.toml").read_text()
    declared = re.search(r'^smg-servicer = "(\S+)"', project, re.MULTILINE)
    assert declared is not None

    def make(release: str) -> Path:
        if release not in made:
            made[release] = folder = tree(release, tmp_path_factory.mktemp(release))
            info = folder / "our_plugin-0.dist-info"
            info.mkdir()
            (info / "METADATA").write_text("Metadata-Version: 2.1\nName: our-plugin\nVersion: 0\n")
            (info / "entry_points.txt").write_text(
                f"[vllm.general_plugins]\nsmg-servicer = {declared[1]}\n"
            )
        return made[release]

    return make


@pytest.fixture
def start(trees: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Start:
    """Runs a launcher: `start(release, form, *arguments)`; `first` is imported from before all."""
    for name in [name for name in os.environ if name.startswith(("SMG_", "VLLM_", "STUB_"))]:
        monkeypatch.delenv(name)

    @contextmanager
    def starting(
        release: str, form: str, *arguments: str, first: Path | None = None
    ) -> Iterator[Child]:
        paths = filter(None, (first, trees(release)))
        monkeypatch.setenv("PYTHONPATH", os.pathsep.join(map(str, paths)))
        module, *words = FORMS[form]
        child = Child(*words, "--host", "127.0.0.1", *arguments, module=module)
        try:
            yield child
        finally:
            child.end()

    return starting


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the processes of a run keep their caches."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(scope="session")
async def model(one_loop: None, home: Path) -> Path:
    """A tiny Qwen3 of noise."""
    path = home / "qwen3"
    await run_module(home, "tests.support.tiny_vllm", str(path))
    return path


@pytest.fixture(scope="session")
def words(model: Path) -> Any:
    """The model's tokenizer, by the tokenizers library alone."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="session")
async def embedding_model(one_loop: None, home: Path) -> Path:
    """One that embeds."""
    path = await asyncio.to_thread(minilm)
    if path is None:
        path = home / "qwen3-embedding"
        await run_module(home, "tests.support.tiny_vllm", str(path), "--embedding")
    return path


@pytest.fixture(scope="session")
async def said(model: Path, embedding_model: Path, home: Path) -> Any:
    """What vLLM itself says of all that tests hold against it; see `tests/support/vllm_oracle.py`.

    It has ended when this is there: two engines would slow each other down.
    """
    out = home / "said.json"
    command = ("tests.support.vllm_oracle", str(model), str(embedding_model), str(out))
    await run_module(home, *command)
    return json.loads(out.read_text())
