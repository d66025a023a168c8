"""One real server for most tests here, and SGLang's own offline answers to hold it against.

A server takes 1.3 GB, and two would slow each other down: the offline engine has ended when the
server starts, and tests that end their server, or start one of their own, come after all others.
"""

from __future__ import annotations

import json
import os
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.support.client import Client, connected
from tests.support.real_sglang import ENGINE, NAME, SGLANG, environment, run_module, serving
from tests.support.router import Router, routing
from tests.support.servers import Server

LAST = (
    "test_rank_death.py",
    "test_conformance.py",
    "test_disaggregation.py",
    "test_media.py",
    "test_encoders.py",
    "test_launches.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.parent == here:
            # The first of them waits for the engine.
            item.add_marker(pytest.mark.timeout(400))
    items.sort(key=lambda item: LAST.index(item.path.name) if item.path.name in LAST else -1)


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("sglang")


@pytest.fixture(scope="session")
async def models(one_loop: None, home: Path) -> dict[str, Path]:
    """Tiny models of noise, by kind."""
    kinds = ("llama", "qwen3", "adapter")
    command = [part for kind in kinds for part in (kind, str(home / kind))]
    await run_module("tests.support.tiny_sglang", *command)
    return {kind: home / kind for kind in kinds}


@pytest.fixture(scope="session")
def model(models: dict[str, Path]) -> Path:
    return models["llama"]


@pytest.fixture(scope="session")
async def offline(models: dict[str, Path], home: Path) -> Any:
    """What `Engine.generate` answers to every case, by model; see `sglang_oracle`."""
    out = home / "offline.json"
    paths = (str(models["llama"]), str(models["qwen3"]))
    await run_module("tests.support.sglang_oracle", str(out), *paths, seconds=300)
    return json.loads(out.read_text())


@dataclass(frozen=True)
class Warm:
    """A server after its warm-up, and what it told before anybody asked it for work."""

    server: Server
    loads: Any


@pytest.fixture(scope="session")
async def warm(offline: Any, model: Path) -> AsyncIterator[Warm]:
    """With a planned warm-up, which a CPU gets only when it is asked for."""
    flags = ("--served-model-name", NAME, *ENGINE)
    async with serving(model, *flags, env={"SMG_SGLANG_SERVICER_WARMUP": "fast:20"}) as process:
        async with connected(process.address, SGLANG) as first:
            loads = await first.stub.GetLoads(first.pb.GetLoadsRequest())
        yield Warm(process, loads)


@pytest.fixture(scope="session")
def server(warm: Warm) -> Server:
    return warm.server


@pytest.fixture(scope="session")
async def client(server: Server) -> AsyncIterator[Client]:
    async with connected(server.address, SGLANG) as connection:
        yield connection


@pytest.fixture(scope="session")
def words(model: Path) -> Any:
    """The model's tokenizer, by the tokenizers library alone."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(model / "tokenizer.json"))


@pytest.fixture(scope="session")
async def router(server: Server, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Router]:
    """In a directory of its own: nothing named like the model lies there."""
    async with routing(tmp_path_factory.mktemp("router"), server.address) as process:
        await process.serves(NAME)
        yield process


@pytest.fixture(scope="session")
def media_env() -> dict[str, str]:
    """SGLang's processors of media need torchvision, which is not beside it."""
    python = os.environ.get("SMG_TORCHVISION")
    assert python, "SMG_TORCHVISION must name the Python of a venv with torchvision"
    (folder,) = (Path(python).parents[1] / "lib").glob("python*/site-packages")
    return {"PYTHONPATH": os.pathsep.join((environment()["PYTHONPATH"], str(folder)))}


@pytest.fixture(scope="session")
async def seeing(one_loop: None, home: Path, media_env: dict[str, str]) -> tuple[Path, list[Any]]:
    """The model, and its images with SGLang's own answers to them."""
    model, out = home / "qwen3-vl", home / "images.json"
    await run_module("tests.support.tiny_vl", str(model), env=media_env)
    await run_module("tests.support.sglang_media_oracle", str(out), str(model), env=media_env)
    return model, json.loads(out.read_text())
