from __future__ import annotations

import sys
from argparse import Namespace
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.requests import RequestTable
from smg_grpc_servicer.vllm import kv_events
from tests.support.vllm_config import vllm_config


@dataclass
class KVEventsConfig:
    """vLLM's, as far as it is read."""

    enable_kv_cache_events: bool = True
    publisher: str = "zmq"
    endpoint: str = "tcp://*:5557"
    replay_endpoint: str | None = None
    buffer_steps: int = 10_000
    hwm: int = 100_000
    topic: str = ""


@pytest.fixture
def vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    config = ModuleType("vllm.config")
    config.KVEventsConfig = KVEventsConfig  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", ModuleType("vllm"))
    monkeypatch.setitem(sys.modules, "vllm.config", config)


def engine(config: Any, reported: Any = None) -> Any:
    llm = SimpleNamespace(vllm_config=vllm_config(kv_events_config=config))
    if reported is not None:
        llm.get_kv_event_sources = lambda: reported
    return llm


def configured(**given: Any) -> Any:
    args = Namespace(**{"kv_events_config": None, "data_parallel_size": 1, **given})
    kv_events.configure(args, environ={})
    return args.kv_events_config


@pytest.mark.usefixtures("vllm")
def test_a_launch_without_a_publisher_gets_one_with_replay() -> None:
    made = configured()
    assert made.enable_kv_cache_events
    assert made.publisher == "zmq"
    assert made.endpoint.startswith("ipc://")
    assert made.replay_endpoint.startswith("ipc://")


@pytest.mark.usefixtures("vllm")
def test_several_ranks_get_ports_of_their_own() -> None:
    made = configured(data_parallel_size=3)
    sources = kv_events.sources(engine(made), (0, 1, 2))
    assert len({str(s.live) for s in sources} | {str(s.replay) for s in sources}) == 6


def test_what_was_configured_stays_as_it_is() -> None:
    own = KVEventsConfig(enable_kv_cache_events=False)
    assert configured(kv_events_config=own) is own


def test_without_prefix_caching_there_is_nothing_to_tell() -> None:
    assert configured(enable_prefix_caching=False) is None


def test_a_vllm_without_the_setting_is_left_alone() -> None:
    args = Namespace(model="m")
    kv_events.configure(args, environ={})
    assert vars(args) == {"model": "m"}


@pytest.mark.parametrize(
    "config",
    [
        None,
        KVEventsConfig(enable_kv_cache_events=False),
        KVEventsConfig(publisher="null"),
    ],
)
def test_an_engine_that_publishes_nothing_has_no_sources(config: Any) -> None:
    assert kv_events.sources(engine(config), (0,)) == ()


def test_what_the_engine_reports_comes_before_what_was_configured() -> None:
    reported = {1: KVEventsConfig(endpoint="tcp://10.1.2.3:40001")}
    first, second = kv_events.sources(engine(KVEventsConfig(), reported), (0, 1))
    assert (str(first.live), first.bind) == ("tcp://127.0.0.1:5557", False)
    assert (str(second.live), second.bind) == ("tcp://10.1.2.3:40001", False)


def test_a_publisher_that_keeps_nothing_is_not_asked() -> None:
    config = KVEventsConfig(replay_endpoint="tcp://*:5558", buffer_steps=0)
    (only,) = kv_events.sources(engine(config), (0,))
    assert only.replay is None


async def test_an_endpoint_that_cannot_work_leaves_the_engine_serving(
    caplog: pytest.LogCaptureFixture,
) -> None:
    made = kv_events.service(
        engine(KVEventsConfig(endpoint="tcp://*:*")),
        SimpleNamespace(requests=SimpleNamespace(limits=SimpleNamespace(ranks=(0,)))),  # type: ignore[arg-type]
        RequestTable(),
        StatusBoard(),
    )
    assert made is None
    assert "--kv-events-config: endpoint" in caplog.text
