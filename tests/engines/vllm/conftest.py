"""A stubbed `vllm` of each release, around that release's own launcher files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.support.child import ROOT, Child
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
    """Runs a launcher: `start(release, form, *arguments)`."""
    for name in [name for name in os.environ if name.startswith(("SMG_", "VLLM_", "STUB_"))]:
        monkeypatch.delenv(name)

    @contextmanager
    def starting(release: str, form: str, *arguments: str) -> Iterator[Child]:
        monkeypatch.setenv("PYTHONPATH", str(trees(release)))
        module, *first = FORMS[form]
        child = Child(*first, "--host", "127.0.0.1", *arguments, module=module)
        try:
            yield child
        finally:
            if child.process.poll() is None:
                child.process.kill()
            child.process.wait()
            if child.process.stdout is not None:
                child.process.stdout.close()

    return starting
