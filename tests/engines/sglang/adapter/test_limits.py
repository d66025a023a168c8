"""What requests are held against is read off SGLang's own records."""

from __future__ import annotations

from types import SimpleNamespace

from smg_grpc_servicer.core.payloads import Adapter
from smg_grpc_servicer.sglang.limits import Limits

ARGS = {
    "dp_size": 2,
    "attn_dp_size": 1,
    "allow_auto_truncate": False,
    "disaggregation_mode": "decode",
    "enable_lora": True,
    "lora_paths": [SimpleNamespace(lora_id="i", lora_name="n", lora_path="/p", pinned=None)],
    "max_loaded_loras": 4,
    "enable_custom_logit_processor": True,
    "return_hidden_states_mode": "full",
    "disable_radix_cache": True,
    "skip_tokenizer_init": True,
    "speculative_algorithm": "EAGLE",
    "speculative_num_draft_tokens": 4,
    "enable_trace": True,
    "language_only": False,
    "limit_mm_data_per_request": '{"image": 2, "video": 0, "audio": "many"}',
}
MODEL = SimpleNamespace(hidden_size=64, is_multimodal=True, model_is_mrope=False)


def test_limits_are_read_off_sglang_s_records() -> None:
    limits = Limits.of(SimpleNamespace(**ARGS), MODEL, {"max_req_input_len": 500})
    assert limits == Limits(
        ranks=2,
        max_prompt_tokens=500,
        role="decode",
        lora=True,
        startup_adapters=(Adapter("i", "n", "/p"),),
        max_adapters=4,
        logit_processors=True,
        hidden_states="full",
        prefix_cache=False,
        tokenizer=False,
        hidden_size=64,
        media=True,
        media_items={"image": 2, "video": 0},
        drafts_per_step=3,
        traced=True,
    )


def test_without_a_draft_model_nothing_is_drafted() -> None:
    args = SimpleNamespace(**(ARGS | {"speculative_algorithm": None, "lora_paths": None}))
    limits = Limits.of(args, MODEL, {})
    assert (limits.drafts_per_step, limits.max_prompt_tokens) == (None, None)
