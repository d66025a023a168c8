"""SGLang's resolved record and `ModelConfig` as far as facts and options read them; no SGLang."""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest


def sglang_config(**given: Any) -> Any:
    """A record of a small text model on one rank."""
    values: dict[str, Any] = {
        "host": "127.0.0.1",
        "port": 30000,
        "ssl_certfile": None,
        "ssl_keyfile": None,
        "ssl_ca_certs": None,
        "ssl_keyfile_password": None,
        "api_key": None,
        "admin_api_key": None,
        "skip_server_warmup": False,
        "skip_tokenizer_init": False,
        "tokenizer_worker_num": 1,
        "model_path": "/models/tiny",
        "served_model_name": "tiny",
        "tokenizer_path": "/models/tiny-tokenizer",
        "preferred_sampling_params": None,
        "weight_version": "default",
        "limit_mm_data_per_request": None,
        "reasoning_parser": None,
        "grammar_backend": "xgrammar",
        "max_running_requests": None,
        "dp_size": 1,
        "attn_dp_size": 1,
        "kv_events_config": None,
        "disable_radix_cache": False,
        "encoder_only": False,
    }
    return SimpleNamespace(**(values | given))


def model_config(**given: Any) -> Any:
    hf = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "pad_token_id": 0,
        "bos_token_id": 1,
    }
    values: dict[str, Any] = {
        "hf_config": SimpleNamespace(**(hf | given.pop("hf", {}))),
        "is_generation": True,
        "is_multimodal": False,
        "is_image_understandable_model": False,
        "context_len": 256,
        "vocab_size": 1000,
        "hf_eos_token_id": {3, 2},
        "dtype": "torch.bfloat16",
        "get_default_sampling_params": lambda: {"temperature": 0.6, "top_k": 20},
    }
    return SimpleNamespace(**(values | given))


def stub_modules(monkeypatch: pytest.MonkeyPatch, **names: Any) -> None:
    """Modules of SGLang by their last two names, `srt__runtime_context={"f": …}`."""
    for path in ("sglang", "sglang.srt"):
        module = ModuleType(path)
        module.__path__ = []
        monkeypatch.setitem(sys.modules, path, module)
    for name, members in names.items():
        parts = ["sglang", "srt", *name.split("__")]
        for end in range(3, len(parts) + 1):
            path = ".".join(parts[:end])
            if end < len(parts) and path in sys.modules:
                continue
            module = ModuleType(path)
            if end < len(parts):
                module.__path__ = []
            else:
                vars(module).update(members)
            monkeypatch.setitem(sys.modules, path, module)
            setattr(sys.modules[".".join(parts[: end - 1])], parts[end - 1], module)
