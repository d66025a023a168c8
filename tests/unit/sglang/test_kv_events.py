"""SGLang's KV events: when it gets a publisher, and who binds what."""

from __future__ import annotations

import json
from typing import Any

import pytest

from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.sglang import kv_events
from tests.support.sglang_config import sglang_config, stub_modules


class Told:
    """`KVEventsConfig` of 0.5.22; the older one has no `bind`."""

    model_fields = dict.fromkeys(
        ("publisher", "endpoint", "bind", "replay_endpoint", "buffer_steps", "hwm", "topic")
    )

    def __init__(self, **given: Any) -> None:
        values: dict[str, Any] = {
            "publisher": "null", "endpoint": "tcp://*:5557", "bind": None,
            "replay_endpoint": None, "buffer_steps": 10, "hwm": 7, "topic": "t",
        }  # fmt: skip
        vars(self).update(values | given)

    @classmethod
    def from_cli(cls, text: str) -> Told:
        return cls(**json.loads(text))


@pytest.fixture
def declared(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What was declared beside the sealed record."""
    made: list[dict[str, Any]] = []
    stub_modules(
        monkeypatch,
        runtime_context={"num_dp_ranks_of": lambda config: config.dp_size},
        arg_groups__overrides={
            "declare_resolution": lambda record, source, **fields: made.append(fields)
        },
        disaggregation__kv_events={"KVEventsConfig": Told},
    )
    return made


def test_a_launch_without_one_gets_a_publisher_on_this_machine(
    declared: list[dict[str, Any]],
) -> None:
    kv_events.configure(object(), sglang_config(), {})
    (fields,) = declared
    made = json.loads(fields["kv_events_config"])
    assert made["publisher"] == "zmq"
    assert made["endpoint"].startswith("ipc://")
    assert set(made) <= set(Told.model_fields)
    auto.clean()


def test_several_ranks_get_ports_of_this_machine(declared: list[dict[str, Any]]) -> None:
    kv_events.configure(object(), sglang_config(dp_size=2), {})
    made = json.loads(declared[0]["kv_events_config"])
    assert made["endpoint"].startswith("tcp://127.0.0.1:")
    first, second = kv_events.sources(sglang_config(dp_size=2, **declared[0]))
    assert second.live.port == first.live.port + 1
    assert first.bind  # the publisher connects to a concrete host


@pytest.mark.parametrize(
    ("given", "environ"),
    [
        ({"kv_events_config": "{}"}, {}),
        ({"disable_radix_cache": True}, {}),
        ({}, {"SMG_SGLANG_SERVICER_KV_EVENTS": "off"}),
    ],
)
def test_who_gets_none(
    declared: list[dict[str, Any]], given: dict[str, Any], environ: dict[str, str]
) -> None:
    kv_events.configure(object(), sglang_config(**given), environ)
    assert declared == []


@pytest.mark.parametrize(
    ("told", "bind"),
    [
        ({"endpoint": "tcp://*:5557"}, False),
        ({"endpoint": "tcp://0.0.0.0:5557"}, False),
        ({"endpoint": "tcp://127.0.0.1:5557"}, True),
        ({"endpoint": "tcp://127.0.0.1:5557", "bind": True}, False),
        ({"endpoint": "tcp://10.0.0.0:5557"}, False),  # SGLang looks for the text anywhere
        ({"endpoint": "ipc:///tmp/x"}, False),
    ],
)
def test_we_bind_where_the_publisher_connects(
    declared: list[dict[str, Any]], told: dict[str, Any], bind: bool
) -> None:
    text = json.dumps({"publisher": "zmq", "replay_endpoint": "tcp://*:6000", **told})
    (source,) = kv_events.sources(sglang_config(kv_events_config=text))
    assert (source.bind, source.topic, source.hwm) == (bind, "t", 7)
    assert str(source.replay) == "tcp://127.0.0.1:6000"


def test_no_sources_without_a_publisher(declared: list[dict[str, Any]]) -> None:
    assert kv_events.sources(sglang_config()) == ()
    assert kv_events.sources(sglang_config(kv_events_config='{"publisher": "null"}')) == ()
