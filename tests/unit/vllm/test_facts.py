"""What the gateway is told of a model, a server and its pairing, from vLLM's configuration."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.vllm import probe as probing
from smg_grpc_servicer.vllm.facts import kv_capacity, model_facts
from smg_grpc_servicer.vllm.pairing import kv_identity, pairing_facts, shm_namespace
from smg_grpc_servicer.vllm.probe import probe
from tests.support.vllm_config import kv_config, vllm_config


def test_a_model_as_the_configuration_has_it() -> None:
    config = vllm_config(
        model_config__get_diff_sampling_param=lambda: {"temperature": 0.6, "max_tokens": 9}
    )
    facts = model_facts(config, media=False)
    assert (facts.model_path, facts.served_model_name) == ("/models/tiny", "tiny")
    assert facts.tokenizer_path == "/models/tiny-tokenizer"
    assert facts.is_generation
    assert (facts.max_context_length, facts.vocab_size) == (256, 1000)
    assert facts.eos_token_ids == (2, 3)
    assert (facts.bos_token_id, facts.pad_token_id) == (1, 0)
    assert facts.default_sampling == {"temperature": 0.6}
    assert facts.architectures == ("Qwen3ForCausalLM",)
    assert kv_capacity(config) == 1600


def test_what_the_model_does_not_say_stays_unset() -> None:
    hf = SimpleNamespace(model_type=None, eos_token_id=None)
    config = vllm_config(
        model_config__hf_config=hf,
        model_config__served_model_name=None,
        model_config__tokenizer=None,
        cache_config__num_gpu_blocks=None,
    )
    facts = model_facts(config, media=True)
    assert facts.served_model_name == facts.tokenizer_path == "/models/tiny"
    assert facts.model_type is None
    assert facts.eos_token_ids == ()
    assert facts.pad_token_id is None
    assert kv_capacity(config) is None


@pytest.mark.parametrize(("media", "model", "told"), [(True, True, True), (False, True, False),
                                                      (True, False, False)])  # fmt: skip
def test_vision_is_told_only_when_it_can_be_served(media: bool, model: bool, told: bool) -> None:
    config = vllm_config(model_config__is_multimodal_model=model)
    assert model_facts(config, media=media).supports_vision is told


class Backend(Enum):
    FLASH_ATTN = "some.module.Class"


def test_the_pairing_facts() -> None:
    config = vllm_config(
        kv_transfer_config=kv_config(), attention_config__backend=Backend.FLASH_ATTN
    )
    facts = pairing_facts(config, {"SMG_PAIRING_PROTOCOL": " p1 "})
    assert (facts.kv_connector, facts.kv_role, facts.kv_engine_id) == (
        "NixlConnector", "kv_both", "e-1",
    )  # fmt: skip
    assert facts.attention_backend == "FLASH_ATTN"
    assert facts.kv_cache_dtype == "auto"
    assert (facts.model_dtype, facts.encoder_dtype) == ("torch.bfloat16", "bfloat16")
    assert facts.pairing_protocol == "p1"
    assert facts.shm_namespace_id == shm_namespace()


def test_without_a_connector_there_is_no_identity() -> None:
    facts = pairing_facts(vllm_config(model_config__dtype="torch.float8_e4m3fn"), {})
    assert (facts.kv_connector, facts.kv_role, facts.kv_engine_id) == (None, None, None)
    assert facts.encoder_dtype is None
    assert facts.pairing_protocol is None


def multi(*children: Any) -> Any:
    return kv_config("MultiConnector", kv_connector_extra_config={"connectors": list(children)})


def child(name: str, **more: Any) -> dict[str, Any]:
    return {"kv_connector": name} | more


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (multi(child("NixlConnector"), child("OffloadingConnector")), "NixlConnector"),
        (multi(child("MooncakeConnector"), child("MooncakeStoreConnector")), "MooncakeConnector"),
        (multi(child("MooncakeStoreConnector"), child("LMCacheConnectorV1")),
         "MooncakeStoreConnector"),
        (multi(child("FlexKVConnectorV1")), "FlexKVConnectorV1"),
        (multi(child("MoRIIOConnector"), child("HF3FSKVConnector")), "HF3FSKVConnector"),
        (multi(child("MoRIIOConnector")), "MoRIIOConnector"),
        (multi(child("NixlConnector"), child("MooncakeConnector")), "MultiConnector"),
        (multi(child("OffloadingConnector")), "MultiConnector"),
        (multi("not a child"), "MultiConnector"),
        (kv_config("MultiConnector", kv_connector_extra_config={"connectors": 5}),
         "MultiConnector"),
        (multi(), "MultiConnector"),
    ],
)  # fmt: skip
def test_a_multi_connector_is_told_as_its_one_moving_child(config: Any, told: str) -> None:
    assert kv_identity(config)[0] == told


def test_a_childs_own_role_and_engine_win() -> None:
    config = multi(child("NixlConnector", kv_role="kv_producer", engine_id="c-1"))
    assert kv_identity(config) == ("NixlConnector", "kv_producer", "c-1")
    assert kv_identity(multi(child("NixlConnector"))) == ("NixlConnector", "kv_both", "e-1")


@pytest.mark.parametrize(
    ("parser", "inside", "told"),
    [
        ("qwen3", False, "after_reasoning"),
        ("qwen3", True, "first_token"),
        ("", False, "first_token"),
        ("qwen3", None, None),
    ],
)
def test_where_a_constraint_starts(parser: str, inside: bool | None, told: str | None) -> None:
    config = vllm_config(
        structured_outputs_config=SimpleNamespace(
            reasoning_parser=parser, enable_in_reasoning=inside
        )
    )
    facts = pairing_facts(config, {})
    assert facts.reasoning_parser == (parser or None)
    assert facts.constraint_start == told


def test_a_field_that_is_gone_is_told_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D6: vLLM moves fields; a default must not hide it."""
    monkeypatch.setattr(probing, "_told", set())
    root = SimpleNamespace(inner=SimpleNamespace(there=1), none=None)
    assert probe(root, "inner.there") == 1
    assert probe(root, "none.further") is None
    assert caplog.records == []
    assert probe(root, "inner.moved") is None
    assert probe(root, "inner.moved") is None
    assert [record.getMessage() for record in caplog.records] == [
        "this vLLM's SimpleNamespace has no 'moved': inner.moved stays unknown"
    ]
