"""Reading model configurations, and sending server arguments as a Struct."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.json_format import MessageToDict
from google.protobuf.struct_pb2 import Struct
from hypothesis import given

from smg_grpc_servicer.core import facts
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.jsonable import MAX_DEPTH
from tests.unit.core.test_jsonable import anything


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (1, 1), (2**40, 2**40), (0, None), (-1, None), (True, None), (False, None), (None, None),
        ("8", None), (8.0, None), (math.nan, None), ([8], None),
    ],
)  # fmt: skip
def test_count(value: object, expected: int | None) -> None:
    """V17: what is no count stays unknown; no default is put in its place."""
    assert facts.count(value) == expected


def test_count_takes_other_integer_types() -> None:
    numpy = pytest.importorskip("numpy")
    assert facts.count(numpy.int32(7)) == 7
    assert type(facts.count(numpy.int32(7))) is int
    assert facts.count(numpy.bool_(True)) is None
    assert facts.count(numpy.array([1, 2])) is None


def test_token_id_zero_is_a_token() -> None:
    assert facts.token_id(0) == 0
    assert facts.token_id(-1) is None
    assert facts.token_id(True) is None


@pytest.mark.parametrize(
    ("config", "generation", "expected"),
    [
        ({}, None, ()),
        ({"eos_token_id": 2}, None, (2,)),
        ({"eos_token_id": 0}, {"eos_token_id": 0}, (0,)),
        ({"eos_token_id": [5, 2]}, {"eos_token_id": [2, 7]}, (5, 2, 7)),
        ({"eos_token_id": 2}, {"eos_token_id": [7, 2]}, (2, 7)),
        ({}, {"eos_token_id": 7}, (7,)),
        ({"text_config": {"eos_token_id": 3}}, {"eos_token_id": 4}, (3, 4)),
        ({"eos_token_id": 1, "text_config": {"eos_token_id": 3}}, None, (1,)),
        ({"eos_token_id": None, "llm_config": {"eos_token_id": 3}}, None, (3,)),
        ({"eos_token_id": [-1, True, "x", 4]}, None, (4,)),
        ({"eos_token_id": -1}, {"eos_token_id": "x"}, ()),
        ({"thinker_config": {"text_config": {"eos_token_id": 9}}}, None, (9,)),
    ],
)
def test_eos_token_ids(
    config: dict[str, Any], generation: dict[str, Any] | None, expected: tuple[int, ...]
) -> None:
    assert facts.eos_token_ids(config, generation) == expected


def test_bos_and_pad() -> None:
    config: dict[str, Any] = {"bos_token_id": 0, "pad_token_id": None}
    assert facts.bos_token_id(config, {"bos_token_id": 5}) == 0
    assert facts.pad_token_id(config, {"pad_token_id": 5}) == 5
    assert facts.pad_token_id({"pad_token_id": -1}) is None
    assert facts.bos_token_id({}) is None


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, None),
        ({"max_position_embeddings": 4096}, 4096),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 4096, "seq_length": 2048}, 2048),
        ({"max_position_embeddings": 8192, "model_max_length": 131072}, 131072),
        ({"max_position_embeddings": 0}, None),
        ({"max_position_embeddings": "4096"}, None),
        ({"text_config": {"max_position_embeddings": 512}}, 512),
        ({"vision_config": {"max_position_embeddings": 77}}, None),
        (
            {
                "max_position_embeddings": 32768,
                "rope_scaling": {
                    "type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32768,
                },
            },
            131072,
        ),
        (
            {
                "max_position_embeddings": 131072,
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 8.0,
                    "original_max_position_embeddings": 131072,
                },
            },
            131072,
        ),
        ({"max_position_embeddings": 64, "rope_scaling": {"type": "yarn", "factor": "x"}}, 64),
    ],
)
def test_context_limit(config: dict[str, Any], expected: int | None) -> None:
    """V17: no `or 8192`."""
    assert facts.context_limit(config) == expected


def test_names_and_sizes() -> None:
    config: dict[str, Any] = {
        "model_type": "qwen2_vl",
        "architectures": ["A", 3, "", "B"],
        "text_config": {"vocab_size": 100, "model_type": "qwen2", "architectures": ["C"]},
    }
    assert facts.model_type(config) == "qwen2_vl"
    assert facts.architectures(config) == ("A", "B")
    assert facts.vocab_size(config) == 100
    assert facts.model_type({}) is None
    assert facts.architectures({"architectures": "A"}) == ()
    assert facts.vocab_size({"vocab_size": 0}) is None


def test_default_sampling_json_is_canonical_and_only_the_five() -> None:
    mapping = {
        "top_p": 0.9, "temperature": 0.6, "top_k": 20.0, "min_p": math.nan, "do_sample": True,
        "repetition_penalty": True, "max_new_tokens": 5,
    }  # fmt: skip
    expected = '{"temperature":0.6,"top_k":20,"top_p":0.9}'
    assert facts.default_sampling_json(mapping) == expected
    assert facts.default_sampling_json(dict(reversed(mapping.items()))) == expected
    assert facts.default_sampling_json({"do_sample": True, "temperature": None}) == ""


def test_read_config(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    assert facts.read_config(path) == {}
    path.write_text('{"vocab_size": 5}')
    assert facts.read_config(path) == {"vocab_size": 5}
    for text, reason in (
        ("{", "not JSON"),
        ("[1]", "got list, a JSON object is needed"),
        ("\udcff", "not JSON"),
        ("[" * 200_000, "not JSON"),
    ):
        path.write_bytes(text.encode("utf-8", "surrogateescape"))
        with pytest.raises(ConfigError, match=reason):
            facts.read_config(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        facts.read_config(tmp_path)


def test_to_struct_keeps_every_kind_and_no_secret() -> None:
    struct = facts.to_struct(
        {
            "none": None, "flag": False, "zero": 0, "ratio": 0.5, "text": "", "empty": {},
            "nothing": [], "list": [1, [None, {"a": True}]], "big": 2**53 + 1, "nan": math.nan,
            "api_key": "hunter2", "url": "redis://:hunter2@h", "nested": {"hf_token": "hunter2"},
        }
    )  # fmt: skip
    assert MessageToDict(struct) == {
        "none": None, "flag": False, "zero": 0.0, "ratio": 0.5, "text": "", "empty": {},
        "nothing": [], "list": [1.0, [None, {"a": True}]], "big": "9007199254740993", "nan": None,
        "url": "redis://[redacted]@h", "nested": {},
    }  # fmt: skip


def test_the_deepest_struct_can_be_parsed() -> None:
    """A parser that stops at 100 levels (C++, Java and Rust do) must take what we send."""
    deep: dict[str, Any] = {}
    for _ in range(2 * MAX_DEPTH):
        deep = {"a": deep, "b": [[[1]]]}
    data = facts.to_struct(deep).SerializeToString()
    assert Struct.FromString(data) == facts.to_struct(deep)


@given(anything)
def test_any_configuration_becomes_a_struct(value: object) -> None:
    struct = facts.to_struct({"value": value})
    assert Struct.FromString(struct.SerializeToString()) == struct
    json.dumps(MessageToDict(struct), allow_nan=False)


@given(anything)
def test_readers_never_raise(value: object) -> None:
    keys = ("eos_token_id", "vocab_size", "architectures", "model_type", "temperature",
            "max_position_embeddings", "rope_scaling", "text_config", "top_k")  # fmt: skip
    config = dict.fromkeys(keys, value)
    config["llm_config"] = dict(config)
    for reader in (facts.eos_token_ids, facts.bos_token_id, facts.pad_token_id):
        reader(config, config)
    for read in (facts.context_limit, facts.vocab_size, facts.architectures, facts.model_type):
        read(config)
    facts.default_sampling_json(config)
