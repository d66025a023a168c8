"""What the gateway is told of a model and a server, from SGLang's own configuration."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.core.facts import to_struct
from smg_grpc_servicer.sglang import facts
from tests.support.sglang_config import model_config, sglang_config, stub_modules

READY = {"status": "ready", "max_total_num_tokens": 4096, "max_req_input_len": 250}


@pytest.fixture
def sglang(monkeypatch: pytest.MonkeyPatch) -> None:
    """As since 0.5.22."""
    ranks = {"num_dp_ranks_of": lambda config: config.dp_size * config.attn_dp_size}
    stub_modules(monkeypatch, runtime_context=ranks)


def server(config: Any, bounds: dict[int, int] | None = None, **args: Any) -> Any:
    record = SimpleNamespace(resolved_dict=lambda: {**vars(config), **args})
    return facts.server_facts(record, config, READY, lambda: bounds or {}, "0.5.23")()


def test_row_11_a_model_as_its_configuration_has_it() -> None:
    told = facts.model_facts(sglang_config(), model_config(), READY)
    assert (told.model_path, told.served_model_name) == ("/models/tiny", "tiny")
    assert told.tokenizer_path == "/models/tiny-tokenizer"
    assert (told.max_context_length, told.max_prompt_tokens) == (256, 250)
    assert told.vocab_size == 1000
    assert told.eos_token_ids == (2, 3)
    assert (told.bos_token_id, told.pad_token_id) == (1, 0)
    assert told.architectures == ("LlamaForCausalLM",)
    assert told.default_sampling == {"temperature": 0.6, "top_k": 20}
    assert told.labels == {}


def test_what_the_model_does_not_say_stays_unset() -> None:
    model = model_config(hf={"pad_token_id": None, "bos_token_id": None}, hf_eos_token_id=set())
    told = facts.model_facts(sglang_config(served_model_name=None, tokenizer_path=None), model, {})
    assert told.served_model_name == told.tokenizer_path == "/models/tiny"
    assert told.pad_token_id is None
    assert told.eos_token_ids == ()
    assert told.max_prompt_tokens is None


@pytest.mark.parametrize(
    ("multimodal", "images", "sees"),
    [(True, True, True), (True, False, False), (False, True, False)],
)
def test_row_12_a_model_that_takes_images_says_so(
    multimodal: bool, images: bool, sees: bool
) -> None:
    model = model_config(is_multimodal=multimodal, is_image_understandable_model=images)
    assert facts.model_facts(sglang_config(), model, READY).supports_vision is sees


def test_a_language_half_is_asked_for_what_the_outer_half_lacks() -> None:
    inner = SimpleNamespace(bos_token_id=7, pad_token_id=8)
    model = model_config(hf={"bos_token_id": None, "pad_token_id": 0, "text_config": inner})
    told = facts.model_facts(sglang_config(), model, READY)
    assert (told.bos_token_id, told.pad_token_id) == (7, 0)


@pytest.mark.parametrize("given", ['{"temperature": 0.1, "n": 2}', {"temperature": 0.1, "n": 2}])
def test_the_operator_s_sampling_wins_over_the_model_s(given: Any) -> None:
    told = facts.model_facts(sglang_config(preferred_sampling_params=given), model_config(), READY)
    assert told.default_sampling == {"temperature": 0.1, "top_k": 20}
    assert told.preferred_sampling == {"temperature": 0.1, "n": 2}


def test_labels_are_a_classifier_s() -> None:
    """transformers makes up two for every other model."""
    labels = {0: "bad", "1": "good"}
    named = {"id2label": labels, "architectures": ["LlamaForSequenceClassification"]}
    told = facts.model_facts(sglang_config(), model_config(hf=named), READY)
    assert told.labels == {0: "bad", 1: "good"}
    plain = facts.model_facts(sglang_config(), model_config(hf={"id2label": labels}), READY)
    assert plain.labels == {}


def test_a_launcher_may_know_better() -> None:
    given = {"vocab_size": 5, "eos_token_ids": [9], "max_req_input_len": 7, "unknown": 1}
    told = facts.model_facts(sglang_config(), model_config(), READY, given)
    assert (told.vocab_size, told.eos_token_ids, told.max_prompt_tokens) == (5, (9,), 7)


def test_row_10_no_credential_is_told(sglang: None) -> None:
    config = sglang_config(api_key="hush", admin_api_key="hush", ssl_keyfile_password="hush")
    told = server(config, watermark_key="hush", watermark_config={"key": "hush"})
    assert "hush" not in str(to_struct(told.server_args))


def test_labels_beside_sglang_s_own(sglang: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SMG_PAIRING_PROTOCOL", raising=False)
    told = server(sglang_config()).server_args
    assert told["grammar_backend"] == "xgrammar"
    assert told["constrained_decoding_start"] == "first_token"
    assert "pairing_protocol" not in told
    limits = {"image": 8, "video": 0, "audio": True, "text": 3}
    config = sglang_config(
        reasoning_parser="qwen3", limit_mm_data_per_request=limits, skip_tokenizer_init=True
    )
    told = facts.labels(config, {"SMG_PAIRING_PROTOCOL": " v2 "})
    assert told == {
        "grammar_backend": "none",
        "pairing_protocol": "v2",
        "mm_item_limits": "image=8",
        "engine_reasoning_parser": "qwen3",
        "constrained_decoding_start": "after_reasoning",
    }
    assert "engine_reasoning_parser" not in facts.labels(sglang_config(reasoning_parser="auto"), {})


@pytest.mark.parametrize("limits", ['{"image": 2}', {"image": 2}])
def test_item_limits_as_text_or_read(limits: Any) -> None:
    assert facts.item_limits(limits) == "image=2"
    assert facts.item_limits("no JSON") == facts.item_limits(None) == facts.item_limits("3") == ""


@pytest.mark.parametrize(
    ("given", "bounds", "window"),
    [
        ({"max_running_requests": 16}, {0: 4}, 16),
        ({}, {}, None),
        ({}, {0: 32}, 32),
        ({"dp_size": 2}, {0: 32}, None),
        ({"dp_size": 2}, {0: 32, 1: 30}, 30),
        ({"attn_dp_size": 4, "enable_dp_attention": True}, dict.fromkeys(range(4), 8), 32),
    ],
)
def test_the_running_window(
    sglang: None, given: dict[str, Any], bounds: dict[int, int], window: int | None
) -> None:
    """The operator's, else the least of the ranks' own, told once all have."""
    told = server(sglang_config(**given), bounds)
    assert told.max_running_requests == told.server_args["max_running_requests"] == window


def test_attention_ranks_count_as_ranks(sglang: None) -> None:
    told = server(sglang_config(attn_dp_size=4, enable_dp_attention=True))
    assert told.data_parallel_size == told.server_args["dp_size"] == 4


def test_until_0_5_21_one_size_counted_both(monkeypatch: pytest.MonkeyPatch) -> None:
    stub_modules(monkeypatch, runtime_context={})
    assert facts.num_ranks(SimpleNamespace(dp_size=4)) == 4


def test_the_ready_report_goes_out_as_it_is(sglang: None) -> None:
    assert server(sglang_config()).scheduler_info == {
        "max_total_num_tokens": 4096,
        "max_req_input_len": 250,
    }
