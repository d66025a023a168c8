"""Loading: the facts that keep requests inside the model's tables."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.mlx import backend, model
from tests.support.tiny_mlx import write_tiny_model


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    backend.prepare()
    return write_tiny_model(tmp_path_factory.mktemp("model"), vocab=300, dtype="float16")


def test_a_directory(directory: Path) -> None:
    loaded = model.load(str(directory))
    assert loaded.directory == directory
    assert loaded.name == str(directory)
    assert loaded.eos_token_ids == (2,)
    assert loaded.context_length == 1024
    assert loaded.vocab_size == 300
    assert loaded.dtype == "float16"
    assert loaded.config["architectures"] == ["LlamaForCausalLM"]
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("fox")) == "fox"


def test_the_dtype_is_cast(directory: Path) -> None:
    assert model.load(str(directory), dtype="float32").dtype == "float32"


def test_the_vocabulary_is_what_can_be_indexed(directory: Path) -> None:
    """Ids past the table read foreign memory or kill the process (P1)."""
    loaded = model.load(str(directory))
    assert model.vocab_size({"vocab_size": 200}, loaded.model) == 200
    assert model.vocab_size({"vocab_size": 5000}, loaded.model) == 300
    assert model.vocab_size({"text_config": {"vocab_size": 250}}, loaded.model) == 250
    assert model.vocab_size({}, loaded.model) == 300


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"eos_token_id": 5}, (5,)),
        ({"eos_token_id": [9, 5]}, (9, 5)),
        ({"eos_token_id": None}, (3, 7)),
        ({"text_config": {"eos_token_id": 4}}, (4,)),
        ({}, (3, 7)),
    ],
)
def test_eos(config: dict[str, Any], want: tuple[int, ...]) -> None:
    assert model.eos_ids(config, SimpleNamespace(eos_token_ids={7, 3})) == want


@pytest.mark.parametrize(
    ("config", "want"),
    [
        ({"max_position_embeddings": 64, "n_positions": 32}, 64),
        ({"max_position_embeddings": 0, "seq_length": 32}, 32),
        ({"max_position_embeddings": None, "text_config": {"max_seq_len": 16}}, 16),
        ({"max_position_embeddings": True}, None),
        ({}, None),
    ],
)
def test_context(config: dict[str, Any], want: int | None) -> None:
    assert model.context_length(config) == want


def test_what_cannot_be_loaded_says_so(tmp_path: Path, directory: Path) -> None:
    with pytest.raises(ConfigError, match=r"--model: .*no config.json"):
        model.load(str(tmp_path))
    with pytest.raises(ConfigError, match=r"--model: .* is not a directory"):
        model.load(str(tmp_path / "gone"))
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "no-such-model"}))
    with pytest.raises(ConfigError, match="cannot be loaded"):
        model.load(str(tmp_path))
    (tmp_path / "config.json").write_text('{"a": 1,}')
    with pytest.raises(ConfigError, match=r"--model: .*/config.json is no JSON: Expecting"):
        model.load(str(tmp_path))
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ConfigError, match=r"--model: .*/config.json holds no JSON object"):
        model.load(str(tmp_path))
    with pytest.raises(ConfigError, match="--adapter-path"):
        model.load(str(directory), adapter_path=str(tmp_path / "gone"))


def test_a_hub_id_comes_from_the_cache_without_a_call(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[bool] = []

    def snapshot(name: str, *, local_files_only: bool = False, allow_patterns: list[str]) -> str:
        assert (name, "*.json" in allow_patterns) == ("org/model", True)
        calls.append(local_files_only)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert model.resolve("org/model") == directory
    assert calls == [True]


def test_a_partial_cache_is_completed_from_the_hub(
    directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").write_text("{}")

    def snapshot(name: str, *, local_files_only: bool = False, allow_patterns: list[str]) -> str:
        return str(tmp_path if local_files_only else directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert model.resolve("org/model") == directory


def test_an_unreachable_hub_is_a_configuration_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def snapshot(name: str, **options: Any) -> str:
        raise OSError("no network")

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    with pytest.raises(ConfigError, match=r"org/model is neither a directory .* no network"):
        model.resolve("org/model")
