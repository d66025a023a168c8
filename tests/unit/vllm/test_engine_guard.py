"""Which requests a headless engine is not to see, and what becomes of those it cannot read."""

from __future__ import annotations

import os
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import pytest

from smg_grpc_servicer.vllm import engine_guard
from smg_grpc_servicer.vllm.engine_guard import Refused, Unreadable, check, check_media
from tests.support.vllm_config import kv_config, vllm_config

CONFIG = vllm_config(speculative_config=None)
"""256 tokens of context, 1000 ids."""


def params(**given: Any) -> Any:
    fields: dict[str, Any] = {
        "prompt_logprobs": None,
        "all_stop_token_ids": set(),
        "logit_bias": None,
        "extra_args": None,
        "verify": lambda *_: None,
    }
    return SimpleNamespace(**fields | given)


def request(**given: Any) -> Any:
    fields: dict[str, Any] = {
        "request_id": "r",
        "client_index": 0,
        "prompt_token_ids": [1, 2],
        "prompt_embeds": None,
        "mm_features": None,
        "sampling_params": params(),
        "pooling_params": None,
    }
    return SimpleNamespace(**fields | given)


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"prompt_token_ids": [0] * 255},
        {"prompt_token_ids": [999]},
        {"prompt_token_ids": None, "prompt_embeds": object()},
        {"sampling_params": params(prompt_logprobs=1)},
        {"sampling_params": params(logit_bias={0: -100.0, 999: 100.0})},
        {"sampling_params": params(all_stop_token_ids={0, 999})},
        {"sampling_params": params(extra_args={"kv_transfer_params": {"do_remote_decode": True}})},
    ],
)
def test_what_an_engine_can_run_passes(given: dict[str, Any]) -> None:
    check(request(**given), CONFIG)


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"prompt_token_ids": []}, "the prompt is empty"),
        ({"prompt_token_ids": None}, "the prompt is empty"),
        ({"prompt_token_ids": [0] * 256}, "a prompt of 256 tokens; allowed: at most 255"),
        ({"prompt_token_ids": [1, 1000]}, "prompt: id 1000; allowed: 0 to 999"),
        ({"prompt_token_ids": [1, -1]}, "prompt: id -1; allowed"),
        ({"mm_features": [object()]}, "media for a model that takes none"),
        ({"sampling_params": None}, "neither sampling nor pooling parameters"),
        ({"sampling_params": None, "pooling_params": object()}, "served for text"),
        ({"sampling_params": params(all_stop_token_ids={1000})}, "stop_token_ids: id 1000"),
        ({"sampling_params": params(logit_bias={-1: 1.0})}, "logit_bias: id -1"),
        ({"sampling_params": params(logit_bias={1: float("nan")})}, "logit_bias: a value"),
        (
            {
                "sampling_params": params(
                    extra_args={"kv_transfer_params": {"do_remote_prefill": 1}}
                )
            },
            "no KV connector",
        ),
    ],
)
def test_what_would_kill_it_is_refused(given: dict[str, Any], words: str) -> None:
    with pytest.raises(Refused, match=words):
        check(request(**given), CONFIG)


def test_what_vllm_itself_says_of_parameters_holds() -> None:
    def verify(*_: object) -> None:
        raise ValueError("logprobs of 50, allowed 20")

    with pytest.raises(ValueError, match="logprobs of 50"):
        check(request(sampling_params=params(verify=verify)), CONFIG)


def test_a_pooling_model_takes_a_prompt_as_long_as_its_context_and_no_generation() -> None:
    pooling = vllm_config(model_config__runner_type="pooling")
    verified: list[object] = []
    embed = SimpleNamespace(verify=verified.append)
    whole = request(prompt_token_ids=[0] * 256, sampling_params=None, pooling_params=embed)
    check(whole, pooling)
    assert verified == [pooling.model_config]
    with pytest.raises(Refused, match="served for pooling"):
        check(request(), pooling)


def place(offset: int, length: int, mask: int | None = None, embeds: int | None = None) -> Any:
    """A feature with nothing but its place."""
    found = SimpleNamespace(
        offset=offset,
        length=length,
        is_embed=None if mask is None else SimpleNamespace(shape=(mask,)),
        get_num_embeds=lambda: length if embeds is None else embeds,
    )
    return SimpleNamespace(mm_position=found)


def test_media_inside_their_prompt_pass() -> None:
    check_media([place(0, 4), place(4, 6, mask=6, embeds=4)], 10, 4)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (place(-1, 2), "media at -1 to 1; allowed: inside the prompt of 10 tokens"),
        (place(0, 0), "media at 0 to 0"),
        (place(8, 3), "media at 8 to 11"),
        (place(0, 2**40), "media at 0 to"),
        (place(0, 4, mask=3), r"mask is of \[3\]; allowed: \[4\]"),
        (place(0, 9), "media of 9 tokens; allowed: at most 8"),
    ],
)
def test_media_that_would_end_or_wedge_the_engine_are_refused(wrong: Any, words: str) -> None:
    """One that is larger than the encoder cache waits for ever, and all that came after it."""
    with pytest.raises(Refused, match=words):
        check_media([place(0, 1), wrong], 10, 8)


def test_a_connector_takes_a_prefill_from_elsewhere() -> None:
    config = vllm_config(kv_transfer_config=kv_config(), speculative_config=None)
    given = {"kv_transfer_params": {"do_remote_prefill": True}}
    check(request(sampling_params=params(extra_args=given)), config)


class Request(msgspec.Struct, array_like=True):
    """The shape of vLLM's, as far as it matters here."""

    request_id: str
    prompt_token_ids: list[int] | None
    client_index: int = 0
    mm_features: list[int] | None = None


class Decoder:
    """Of vLLM's make."""

    def __init__(self, t: Any = None) -> None:
        self._decoder = msgspec.msgpack.Decoder(*(() if t is None else (t,)))

    def decode(self, bufs: Any) -> Any:
        return self._decoder.decode(bufs[0])


class Engine:
    """What `install` changes in vLLM's engine core."""

    def __init__(self, frames: list[bytes]) -> None:
        self.vllm_config = CONFIG
        self.frames = frames
        self.run: list[str] = []
        self.failed: list[tuple[list[str], int]] = []
        self.logged: list[Any] = []

    def preprocess_add_request(self, request: Any) -> Any:
        self.run.append(request.request_id)
        if request.request_id == "broken":
            raise KeyError("vLLM's own")

    def _handle_request_preproc_error(self, request: Any) -> None:
        self.logged.append(request.request_id)

    def _send_error_outputs_to_client(self, ids: list[str], client: int) -> None:
        self.failed.append((ids, client))

    def process_input_sockets(self) -> None:
        """As vLLM's thread: what cannot be decoded is outside its `try`."""
        decoder = engine_guard._reading_all(Decoder, Request)(Request)
        for each in self.frames:
            request = decoder.decode([each])
            try:
                self.preprocess_add_request(request)
            except Exception:
                self._handle_request_preproc_error(request)


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> type[Engine]:
    """A class of its own for each test, with the guard in it."""

    class Guarded(Engine):
        preprocess_add_request = engine_guard._checking(Engine.preprocess_add_request)
        _handle_request_preproc_error = engine_guard._answering(
            Engine._handle_request_preproc_error
        )
        process_input_sockets = engine_guard._not_outlived(Engine.process_input_sockets)

    monkeypatch.setattr(engine_guard, "check", lambda request, config: None)
    return Guarded


def packed(*values: object) -> bytes:
    return msgspec.msgpack.encode(values)


def test_a_request_that_cannot_be_read_fails_alone(
    guarded: type[Engine], caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM's own thread ends there, and the engine answers nobody any more."""
    engine = guarded(
        [packed("a", [1]), packed("b", "no list", 3), packed("c", 1.5), packed("d", [])]
    )
    engine.process_input_sockets()
    assert engine.run == ["a", "d"]
    assert engine.failed == [(["b"], 3), (["c"], 0)]
    assert engine.logged == []
    assert "request b is refused: it cannot be read: Expected `array | null`" in caplog.text
    assert "Traceback" not in caplog.text


def test_vllms_own_failures_are_left_to_vllm(guarded: type[Engine]) -> None:
    engine = guarded([packed("broken", [1])])
    engine.process_input_sockets()
    assert engine.logged == ["broken"]
    assert engine.failed == []


def test_a_refusal_is_one_line_and_an_error_to_the_client(
    guarded: type[Engine], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(request: Any, config: Any) -> None:
        raise ValueError("vLLM would not")

    monkeypatch.setattr(engine_guard, "check", refuse)
    engine = guarded([packed("a", [1], 2)])
    engine.process_input_sockets()
    assert engine.run == []
    assert engine.failed == [(["a"], 2)]
    assert [record.getMessage() for record in caplog.records] == [
        "request a is refused: vLLM would not"
    ]


def test_an_engine_that_can_read_nothing_any_more_ends(
    guarded: type[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead is seen and restarted; deaf is not."""
    codes: list[int] = []
    monkeypatch.setattr(os, "_exit", codes.append)
    guarded([b"\xc1"]).process_input_sockets()
    assert codes == [1]


def test_what_else_is_decoded_is_not_touched() -> None:
    decoder = engine_guard._reading_all(Decoder, Request)()
    assert decoder.decode([packed(1, "x")]) == [1, "x"]
    with pytest.raises(msgspec.DecodeError):
        decoder.decode([b"\xc1"])
    assert Unreadable("r", 0, "f").fault == "f"


class Rows(NamedTuple):
    """vLLM's `LogprobsTensors` from 0.32 on."""

    ids: list[int]
    logprobs: list[float]
    ranks: list[int]
    counts: list[int] | None = None
    counts_on_device: list[int] | None = None


class Output(msgspec.Struct, array_like=True):
    request_id: str
    new_prompt_logprobs_tensors: Rows | None = None


class Outputs(msgspec.Struct, array_like=True):
    outputs: list[Output]


class Encoder:
    """Of vLLM's make."""

    def encode_into(self, obj: Any, buf: bytearray) -> Any:
        msgspec.msgpack.Encoder().encode_into(obj, buf)


def test_prompt_logprobs_are_sent_as_the_wheels_read_them() -> None:
    """What they cannot read they drop, and the request hangs; nothing else is touched."""
    encoder, written = engine_guard._readable(Encoder, Outputs)(), bytearray()
    encoder.encode_into(Outputs([Output("a"), Output("b", Rows([1], [-0.5], [1]))]), written)
    assert msgspec.msgpack.decode(written) == [[["a", None], ["b", [[1], [-0.5], [1], None]]]]
    encoder.encode_into(["anything"], written)
    assert msgspec.msgpack.decode(written) == ["anything"]
