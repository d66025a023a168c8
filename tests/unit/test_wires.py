"""No field of the four protos is forgotten, and the tables that say what became of it are true."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.core.errors import Unsupported
from smg_grpc_servicer.core.loads import (
    DisaggregationLoad,
    Load,
    LoraLoad,
    MemoryLoad,
    QueueLoad,
    SpeculativeLoad,
)
from smg_grpc_servicer.core.payloads import HiddenStates
from smg_grpc_servicer.core.types import (
    Delta,
    Embedding,
    Feature,
    Finish,
    GenerateSpec,
    KvTransfer,
    LogprobRows,
    LogprobSpec,
    ModelFacts,
    PairingFacts,
    PromptLogprobs,
    ServerFacts,
)
from smg_grpc_servicer.core.wire import Choice, LiveFacts, Wire
from smg_grpc_servicer.mlx.wire import MlxWire
from smg_grpc_servicer.sglang.wire import SglangWire
from smg_grpc_servicer.sglang.wire_parts import adapter
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.tokenspeed.wire import TokenSpeedWire
from smg_grpc_servicer.vllm.wire import VllmWire
from tests.support.protos import covered, fields, put, said

WIRES: Mapping[str, Wire] = {
    "mlx": MlxWire(),
    "vllm": VllmWire(),
    "sglang": SglangWire(),
    "tokenspeed": TokenSpeedWire(),
}
COMMON = "smg.grpc.common"
"""Messages of this package are shared by all protos and have their bodies in core."""

WITH_LOGPROBS = {"return_logprob": True, "logprob_start_len": -1}
WITH_PIXELS = {"mm_inputs.pixel_values.data": b"1234"}
LEGACY = {"kv_transfer_params.remote_host": "h", "kv_transfer_params.remote_port": 80}
CONTEXT: Mapping[str, Mapping[str, Any]] = {
    "logprob_start_len": WITH_LOGPROBS,
    "top_logprobs_num": WITH_LOGPROBS,
    "token_ids_logprob": WITH_LOGPROBS,
    "remote_host": LEGACY,
    "remote_port": LEGACY,
    "grammar_from_first_token": {"sampling_params.regex": "a"},
    "model_specific_tensors": WITH_PIXELS,
    "im_token_id": WITH_PIXELS,
    "mm_placeholders": WITH_PIXELS,
    "modalities": WITH_PIXELS,
    "image_data": WITH_PIXELS,
    "video_data": WITH_PIXELS,
    "audio_data": WITH_PIXELS,
}
"""What else a request must say for a field to mean something."""
VALUES: Mapping[str, Any] = {
    "kv_transfer_params_json": '{"do_remote_prefill":true}',
    "bootstrap_room": 0,
    "logprob_start_len": 1,
    "include": "memory",
}
"""Where not any value will do; a room of 0 is a room."""


def tables(engine: str) -> Any:
    return import_module(f"smg_grpc_servicer.{engine}.fields")


def messages(engine: str, side: str) -> Iterator[Any]:
    """The proto's own messages that its RPCs take (`input_type`) or give (`output_type`)."""
    service = DIALECTS[engine].pb.DESCRIPTOR.services_by_name[
        DIALECTS[engine].service.rsplit(".", 1)[1]
    ]
    for method in service.methods:
        message = getattr(method, side)
        if message.file.package != COMMON:
            yield message


def entries(*names: str) -> list[tuple[str, str]]:
    """All rows of the named tables, with their engine."""
    return [
        (engine, path)
        for engine in WIRES
        for name in names
        for path in getattr(tables(engine), name)
    ]


def request(engine: str, path: str) -> Any:
    """A request of the type a path begins with, ready for that field to be set."""
    name, *_, last = path.split(".")
    message = getattr(DIALECTS[engine].pb, name)()
    if "tokenized" in message.DESCRIPTOR.fields_by_name:
        message.tokenized.input_ids.append(5)
    if not path.startswith("AbortRequest"):
        for field, value in CONTEXT.get(last, {}).items():
            put(message, f"{name}.{field}", value)
    return message


def converted(wire: Wire, message: Any) -> dict[str, Any]:
    """What the wire makes of a request, flat: `sampling.temperature` and so on."""
    memory, queues = MemoryLoad(1.0, 2.0, 0.5, 400), QueueLoad(1, 0, 0, 0)
    loads = [
        Load(rank=rank, running_requests=rank, memory=memory, queues=queues) for rank in range(3)
    ]
    name = message.DESCRIPTOR.name
    if name == "AbortRequest":
        return {"": wire.abort_ids(message)}
    if name == "GetLoadsRequest":
        answer = wire.loads_response(message, loads, "1")
        answer.ClearField("timestamp")
        return {"": answer}
    if name == "LoadLoRAAdapterRequest":
        return flat(adapter(message))
    if name == "UnloadLoRAAdapterRequest":
        return {"": (message.lora_name, message.lora_id)}
    spec = wire.generate_spec(message) if name == "GenerateRequest" else wire.embed_spec(message)
    return flat(spec)


def flat(value: Any, path: str = "") -> dict[str, Any]:
    if not dataclasses.is_dataclass(value):
        return {path: value}
    result: dict[str, Any] = {}
    for field in dataclasses.fields(value):
        result |= flat(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    return result


@pytest.mark.parametrize("engine", WIRES)
def test_every_request_field_is_mapped_refused_or_ignored(engine: str) -> None:
    known = tables(engine)
    every = (known.MAPPED, known.REFUSED, known.IGNORED)
    walked = {
        path
        for message in messages(engine, "input_type")
        for path, _ in fields(message, "", *every)
    }
    forgotten = sorted(p for p in walked if not any(covered(p, table) for table in every))
    assert forgotten == []
    twice = sorted(p for p in walked if sum(covered(p, table) for table in every) > 1)
    assert twice == []
    names = {message.name for message in messages(engine, "input_type")}
    gone = sorted(p for table in every for p in table if p not in walked and p not in names)
    assert gone == [], "fields that the proto no longer has"


@pytest.mark.parametrize(("engine", "path"), entries("MAPPED"))
def test_a_mapped_field_changes_what_the_table_says(engine: str, path: str) -> None:
    target = tables(engine).MAPPED[path]
    before = converted(WIRES[engine], request(engine, path))
    message = request(engine, path)
    put(message, path, VALUES.get(path.rsplit(".", 1)[1]))
    after = converted(WIRES[engine], message)

    changed = {name for name in {*before, *after} if before.get(name) != after.get(name)}
    section = target.rsplit(".", 1)[0]
    beside = {"needs", section}
    if target == "text":
        beside.add("prompt")  # the two are one choice
    elif section.partition(".")[0] == "media":
        beside |= {name for name in changed if name.startswith("media")}
    elif section in ("kv_transfer", "logprobs", "references", "sampling.constraint"):
        beside |= {name for name in changed if name.startswith(section)}
    assert target in changed
    assert changed - beside - {target} == set()


@pytest.mark.parametrize(("engine", "path"), [(e, p) for e, p in entries("REFUSED") if "." in p])
def test_a_refused_field_is_refused_by_name(engine: str, path: str) -> None:
    message = request(engine, path)
    converted(WIRES[engine], message)
    put(message, path, VALUES.get(path.rsplit(".", 1)[1]))

    asked = tables(engine).REFUSED[path]
    words = asked.value if isinstance(asked, Feature) else asked
    with pytest.raises(Unsupported, match="servicer does not support") as caught:
        converted(WIRES[engine], message)
    assert caught.value.feature == words


@pytest.mark.parametrize("engine", WIRES)
def test_not_carried_names_the_features_that_are_refused(engine: str) -> None:
    refused = tables(engine).REFUSED.values()
    assert {f for f in refused if isinstance(f, Feature)} == tables(engine).NOT_CARRIED


@pytest.mark.parametrize(("engine", "path"), entries("IGNORED"))
def test_an_ignored_field_changes_nothing(engine: str, path: str) -> None:
    message = request(engine, path)
    before = converted(WIRES[engine], message)
    put(message, path, VALUES.get(path.rsplit(".", 1)[1]))

    assert message.ByteSize() > request(engine, path).ByteSize()
    assert converted(WIRES[engine], message) == before


def profile_options() -> list[str]:
    descriptor: Any = common_pb2.StartProfileRequest.DESCRIPTOR
    return [path for path, _ in fields(descriptor)]


@pytest.mark.parametrize("path", profile_options())
def test_every_profile_option_is_passed_on(path: str) -> None:
    wire = WIRES["sglang"]
    message = common_pb2.StartProfileRequest()
    put(message, path)

    changed = (
        flat(wire.profile_spec(message)).items()
        - flat(wire.profile_spec(common_pb2.StartProfileRequest())).items()
    )
    assert [name for name, _ in changed] == [path.rsplit(".", 1)[1]]


# Responses.

ROWS = LogprobRows([-0.5], [[7, 8]], [[-0.5, -1.5]], [[-0.25]])
PROMPT_ROWS = PromptLogprobs([5, 6], [None, -0.5], [[], [6]], [[], [-0.5]])
FACTS = ModelFacts(
    model_path="/m",
    served_model_name="m",
    tokenizer_path="/t",
    supports_vision=True,
    max_context_length=64,
    max_prompt_tokens=60,
    vocab_size=100,
    model_type="llama",
    architectures=("A",),
    eos_token_ids=(2,),
    pad_token_id=3,
    bos_token_id=1,
    default_sampling={"temperature": 0.6},
    preferred_sampling={"temperature": 0.6},
    labels={0: "bad", 1: "good"},
    weight_version="w1",
    dtype="torch.bfloat16",
)
SERVER = ServerFacts(
    server_type="x-grpc",
    version="1.2",
    data_parallel_size=2,
    max_running_requests=8,
    block_size=16,
    is_paused=True,
    server_args={"tp_size": 2, "api_key": "hush"},
    scheduler_info={"max_total_num_tokens": 4096},
    pairing=PairingFacts(*(field.name for field in dataclasses.fields(PairingFacts))),
)
LIVE = LiveFacts(active_requests=1, uptime_seconds=2.0, started_at=3.0, last_receive_at=4.0)
LOADS = [
    Load(
        rank=rank,
        running_requests=2,
        waiting_requests=1,
        waiting_uncached_tokens=40,
        used_tokens=100,
        max_total_tokens=400,
        max_running_requests=8,
        token_usage=0.25,
        active_token_usage=0.2,
        gen_throughput=50.0,
        cache_hit_rate=0.5,
        utilization=0.75,
        memory=MemoryLoad(1.0, 2.0, 0.5, 400),
        queues=QueueLoad(1, 2, 3, 4),
        speculative=SpeculativeLoad(2.5, 0.5),
        lora=LoraLoad(1, 4, 0.25),
        disaggregation=DisaggregationLoad("decode", 1, 2, 3, 4, 5, 6.5, 7.5),
    )
    for rank in range(2)
]


def answers(engine: str) -> Iterator[Any]:
    """Every message of the proto, made from all there is to know."""
    wire, pb = WIRES[engine], DIALECTS[engine].pb
    spec = GenerateSpec("r", prompt=[5, 6], logprobs=LogprobSpec(2, 2, token_ids=(1,)), stream=True)
    delta = Delta(1, [7], ROWS, None, 2, 1, 1, PROMPT_ROWS, "w1")
    streamed = Choice(1, prompt_tokens=2, stream=True)
    streamed.add(delta)
    yield wire.chunk(spec, streamed, delta)
    for matched in (7, "end"):
        whole = Choice(1, prompt_tokens=2, stream=False)
        whole.add(dataclasses.replace(delta, logprobs=ROWS.slice(0, 1)))
        handed = KvTransfer(params_json='{"remote_host":"h","remote_port":80}')
        hidden = HiddenStates(0, [[0.5], [0.25]])
        yield wire.complete(spec, whole, Finish("stop", matched, 3, 4, handed, hidden))
    yield wire.abort_response(["r"])
    yield wire.health_response(True, "OK")
    yield wire.model_info(FACTS)
    yield wire.server_info(SERVER, LIVE)
    if engine in ("vllm", "sglang"):
        yield wire.embed_response(Embedding([0.5], 2))
    if engine != "mlx":
        yield wire.loads_response(pb.GetLoadsRequest(), LOADS, "1.2")


@pytest.mark.parametrize("engine", WIRES)
def test_every_response_field_is_filled_or_listed(engine: str) -> None:
    unfilled = tables(engine).NOT_FILLED
    seen = {path for message in answers(engine) for path in said(message)}
    for message in messages(engine, "output_type"):
        for path, _ in fields(message, "", unfilled):
            if not covered(path, unfilled):
                assert path in seen, f"{path} stays empty and is not in NOT_FILLED"
    assert [path for path in seen if covered(path, unfilled)] == []


@pytest.mark.parametrize("engine", WIRES)
def test_what_is_not_known_is_left_out(engine: str) -> None:
    """Unknown is the proto's default; only names, flags of our own and times are there."""
    wire = WIRES[engine]
    model = set(said(wire.model_info(ModelFacts("/m", "m"))))
    assert {path.rsplit(".", 1)[1] for path in model} <= {
        "model_path",
        "served_model_name",
        "is_generation",
    }
    server = set(said(wire.server_info(ServerFacts("x-grpc"), LiveFacts(0, 1.0, 2.0))))
    assert {path.rsplit(".", 1)[1] for path in server} <= {
        "server_type",
        "uptime_seconds",
        "start_time",
        "server_args",
        "scheduler_info",
    }
    if engine != "mlx":
        loads = wire.loads_response(DIALECTS[engine].pb.GetLoadsRequest(), [Load(rank=1)], "")
        assert {path.rsplit(".", 1)[1] for path in said(loads)} == {
            "timestamp",
            "dp_rank_count",
            "dp_rank",
        }
