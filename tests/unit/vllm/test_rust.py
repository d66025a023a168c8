"""What a launch on the Rust path comes to, before anything is started."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.rust.binding import Binding
from smg_grpc_servicer.vllm import kv_events, rust
from smg_grpc_servicer.vllm.media_options import MediaOptions
from smg_grpc_servicer.vllm.options import Plan, plan
from smg_grpc_servicer.vllm.rust_facts import Facts
from smg_grpc_servicer.vllm.rust_options import (
    refuse_what_rust_lacks,
    refuse_what_the_wheel_lacks,
)
from smg_grpc_servicer.vllm.tokenizer_dir import tokenizer_dir
from tests.support.vllm_config import kv_config, vllm_config


def asked(environ: dict[str, str] | None = None, **given: Any) -> tuple[argparse.Namespace, Plan]:
    args = argparse.Namespace(host=None, port=8000, smg_servicer_impl="rust", **given)
    return args, plan(args, environ or {})


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SMG_VLLM_SERVICER_DRAIN_SECS", "SMG_PAIRING_PROTOCOL"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    ("variable", "environ", "given", "seconds"),
    [
        (None, {}, {}, 5),
        ("7", {}, {}, 7),
        ("7", {}, {"smg_drain_seconds": "9"}, 9),
        (None, {"SMG_SERVICER_DRAIN_SECONDS": "8"}, {}, 8),
        ("7", {"SMG_SERVICER_DRAIN_SECONDS": "8"}, {}, 7),
        (None, {}, {"shutdown_timeout": 30}, 30),
        (None, {}, {"smg_drain_seconds": "20"}, 20),
    ],
)
def test_the_drain_is_the_one_that_was_chosen_for_this_path_or_for_all(
    variable: str | None,
    environ: dict[str, str],
    given: dict[str, Any],
    seconds: float,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if variable is not None:
        monkeypatch.setenv("SMG_VLLM_SERVICER_DRAIN_SECS", variable)
    assert rust.knobs_of(asked(environ, **given)[1]).drain_seconds == seconds


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"api_key": ["k"]}, "its server has no tokens"),
        ({"smg_max_chunk_tokens": "5"}, "^--max-chunk-tokens: no effect with --servicer-impl rust"),
        ({"smg_reflection": False, "smg_stall_seconds": "3"}, "^--stall-seconds, --reflection: no"),
    ],
)
def test_what_the_rust_server_lacks_is_refused(given: dict[str, Any], words: str) -> None:
    """Q1: no security flag is taken and then left out."""
    with pytest.raises(ConfigError, match=words):
        refuse_what_rust_lacks(*asked(**given))


def test_a_variable_that_other_servers_may_mind_is_only_told(
    caplog: pytest.LogCaptureFixture,
) -> None:
    refuse_what_rust_lacks(*asked({"SMG_SERVICER_STALL_SECONDS": "3"}))
    assert "SMG_SERVICER_STALL_SECONDS: no effect with --servicer-impl rust" in caplog.text
    caplog.clear()
    refuse_what_rust_lacks(*asked())
    assert caplog.text == ""


def values(facts: Facts) -> dict[str, object]:
    return {name: word.value for name, word in facts.keywords.items() if word.value is not None}


def test_facts_are_those_of_the_python_path() -> None:
    config = vllm_config(
        model_config__get_diff_sampling_param=lambda: {"temperature": 0.6, "max_tokens": 9},
        model_config__try_get_generation_config=lambda: {"eos_token_id": [3, 7]},
        kv_transfer_config=kv_config(),
    )
    found = values(Facts.of(config, log_stats=True))
    assert found == found | {
        "served_model_name": "tiny",
        "tokenizer_path": "/models/tiny-tokenizer",
        "is_generation": True,
        "max_context_length": 256,
        "vocab_size": 1000,
        "supports_vision": False,
        "eos_token_ids": [2, 3, 7],
        "bos_token_id": 1,
        "pad_token_id": 0,
        "default_sampling_params_json": '{"temperature":0.6}',
        "data_parallel_size": 1,
        "max_num_seqs": 8,
        "block_size": 16,
        "kv_connector": "NixlConnector",
        "kv_engine_id": "e-1",
        "model_dtype": "torch.bfloat16",
        "structured_outputs_backend": "auto",
        "constrained_decoding_start": "first_token",
        "log_stats": True,
    }
    absent = {"kv_events_endpoint", "mm_item_limits", "smg_media_processor", "pooler_dimensions"}
    assert not absent & set(found)


def test_what_is_unknown_is_left_to_the_binding() -> None:
    hf = SimpleNamespace(model_type=None, eos_token_id=None)
    found = values(Facts.of(vllm_config(model_config__hf_config=hf), log_stats=False))
    assert not {"eos_token_ids", "bos_token_id", "model_type"} & set(found)
    assert "default_sampling_params_json" not in found


@pytest.mark.parametrize(("steps", "replay"), [(100, "ipc://r"), (0, None)])
def test_the_publisher_is_where_the_relay_subscribes(steps: int, replay: str | None) -> None:
    events = SimpleNamespace(
        enable_kv_cache_events=True, publisher="zmq", endpoint="ipc://e",
        replay_endpoint="ipc://r", buffer_steps=steps, topic="kv",
    )  # fmt: skip
    found = values(Facts.of(vllm_config(kv_events_config=events), log_stats=True))
    assert found["kv_events_endpoint"] == "ipc://e"
    assert found["kv_events_topic"] == "kv"
    assert found.get("kv_events_replay_endpoint") == replay


def media_config(**limits: int) -> Any:
    media = SimpleNamespace(
        get_limit_per_prompt=lambda kind: limits.get(kind, 999),
        mm_device_do_normalize=True,
        mm_processor_kwargs={"num_crops": 4, "device": "cuda"},
    )
    return vllm_config(
        model_config__is_multimodal_model=True,
        model_config__multimodal_config=media,
        model_config__allowed_media_domains=["example.com"],
    )


def test_the_pipelines_settings_are_handed_through(tmp_path: Path) -> None:
    media = MediaOptions(processor="smg", source="flag", max_inflight=3, max_video_frames=16)
    facts = Facts.of(
        media_config(image=2, video=0), log_stats=True, media=media, tokenizer_dir=tmp_path
    )
    assert facts.model.supports_vision
    assert facts.keywords["mm_item_limits"].value == "image=2"
    word = facts.keywords["smg_media_processor"]
    assert word.asked == "--mm-processor"
    given: Any = word.value
    assert given == given | {
        "model_dir": str(tmp_path),
        "model_id": "/models/tiny",
        "raw_pixels": True,
        "encoder_dtype": "bfloat16",
        "max_inflight": 3,
        "max_items": None,
        "engine_item_limits": {"image": 2},
        "allowed_domains": ["example.com"],
        "max_item_bytes": 32 * 2**20,
        "fetch_timeout_ms": 10_000,
        "video_fetch_timeout_ms": 30_000,
        "video_frame_budget": 16,
        "turbojpeg": "prefer",
        "source": "flag",
    }
    assert json.loads(given["processor_kwargs_json"]) == {"num_crops": 4}


def test_a_vllm_that_moved_its_list_of_hosts_is_no_vllm_without_one(tmp_path: Path) -> None:
    """The pipeline would then fetch from every host that the gateway names."""
    config = media_config()
    del config.model_config.allowed_media_domains
    with pytest.raises(AttributeError, match="allowed_media_domains"):
        Facts.of(config, log_stats=True, media=MediaOptions("smg"), tokenizer_dir=tmp_path)


def test_a_setting_that_a_wheel_would_not_heed() -> None:
    """It takes any key, and says nothing of those that it does not know."""

    def wheel(*keywords: str) -> Binding:
        return Binding("VllmGrpcServer", "smg 1", None, frozenset(keywords), frozenset())

    required = MediaOptions("smg", turbojpeg="require")
    with pytest.raises(ConfigError, match=r"^--mm-turbojpeg: got 'require', which smg 1 does not"):
        refuse_what_the_wheel_lacks(required, wheel())
    refuse_what_the_wheel_lacks(required, wheel("mm_encoder_budget"))
    refuse_what_the_wheel_lacks(MediaOptions("smg"), wheel())
    refuse_what_the_wheel_lacks(MediaOptions(turbojpeg="require"), wheel())


@pytest.mark.parametrize(
    ("config", "directory", "words"),
    [
        (vllm_config(), Path("/somewhere"), "this model takes no media"),
        (media_config(image=0, video=0), Path("/somewhere"), "this model takes no media"),
        (media_config(), None, "there is none for '/models/tiny-tokenizer'"),
    ],
)
def test_a_pipeline_that_cannot_work_is_refused(
    config: Any, directory: Path | None, words: str
) -> None:
    media = MediaOptions(processor="smg")
    with pytest.raises(ConfigError, match=words):
        Facts.of(config, log_stats=True, media=media, tokenizer_dir=directory)


def test_the_tokenizers_directory(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "config.json").touch()
    config = vllm_config(model_config__tokenizer=str(tmp_path))
    assert tokenizer_dir(config) is None
    assert "stop strings are refused" in caplog.text
    (tmp_path / "tokenizer.json").touch()
    assert tokenizer_dir(config) == tmp_path


def test_a_tokenizer_on_the_hub_is_fetched_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine fetches its model later; GetTokenizer must not wait for that."""
    (tmp_path / "tokenizer.json").touch()
    calls: list[dict[str, Any]] = []

    def snapshot_download(name: str, **options: Any) -> str:
        calls.append({"name": name, **options})
        return str(tmp_path)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", hub)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    config = vllm_config(model_config__tokenizer="org/name", model_config__tokenizer_revision="v1")
    assert tokenizer_dir(config) == tmp_path
    (call,) = calls
    assert (call["name"], call["revision"]) == ("org/name", "v1")
    assert "tokenizer.json" in call["allow_patterns"]
    assert not any("safetensors" in pattern for pattern in call["allow_patterns"])


def test_without_a_network_it_goes_on_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def snapshot_download(name: str, **_: Any) -> str:
        raise ConnectionError(name)

    hub = SimpleNamespace(snapshot_download=snapshot_download)
    monkeypatch.setitem(__import__("sys").modules, "huggingface_hub", hub)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "empty"))
    assert tokenizer_dir(vllm_config(model_config__tokenizer="org/name")) is None
    assert "'org/name' is not in the local cache" in caplog.text


def test_several_ranks_publish_only_where_they_were_told_to(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Token ids travel in events: no port of every interface is opened by default."""
    caplog.set_level("INFO")
    args = argparse.Namespace(kv_events_config=None, data_parallel_size=2)
    kv_events.configure(args, {}, binds=True)
    assert args.kv_events_config is None
    assert "KV events of 2 ranks are off" in caplog.text


def test_describing_without_a_wheel_is_exit_code_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(__import__("sys").modules, "smg.servicer", None)
    assert rust.main([]) == 2
    assert "error: the Rust servicer needs the wheel smg" in capsys.readouterr().err


@pytest.mark.parametrize(("argument", "code"), [("--help", 0), ("--helpp", 2)])
def test_describing_explains_itself(
    argument: str, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        rust.main([argument])
    assert ended.value.code == code
    told = capsys.readouterr()
    assert "usage: python -m smg_grpc_servicer.vllm.rust" in told.out + told.err
