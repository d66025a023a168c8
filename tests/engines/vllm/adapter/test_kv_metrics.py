"""What the metrics endpoint tells of KV events, from a publisher to two readers."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from types import SimpleNamespace
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families
from smg_grpc_proto.generated import common_pb2

from smg_grpc_servicer.core.metrics import RecordedMetrics
from smg_grpc_servicer.core.metrics_server import MetricsServer
from smg_grpc_servicer.kv_events.normalize import REASONS
from tests.support.kv_publisher import payload, stored
from tests.support.kv_served import Subscription
from tests.support.stub_async_llm import StubAsyncLLM
from tests.support.vllm_config import vllm_config
from tests.support.vllm_served import served_vllm
from tests.support.wait import until
from tests.support.zmq_publisher import ZmqPublisher


@dataclass
class Figures:
    """One scrape: values and types by name, without the common beginning."""

    values: dict[str, float]
    types: dict[str, str]


def scrape(port: int) -> Figures:
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    found = Figures({}, {})
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            name = sample.name.removeprefix("smg_servicer_kv_")
            if name != sample.name:
                assert sample.labels["engine"] == "vllm"
                found.values[name], found.types[name] = sample.value, family.type
    return found


async def test_every_figure_of_the_relay_is_scraped() -> None:
    """Forwarded, dropped by reason, gaps, replays, how far a reader is behind, and the readers."""
    publisher = ZmqPublisher()
    config = vllm_config()
    config.kv_events_config = SimpleNamespace(
        enable_kv_cache_events=True,
        publisher="zmq",
        endpoint=publisher.endpoint.replace("127.0.0.1", "*"),
        replay_endpoint=publisher.replay_endpoint,
        buffer_steps=100,
        hwm=100_000,
        topic="",
    )
    metrics = RecordedMetrics("vllm", "m", state=lambda: "serving")
    endpoint = MetricsServer.start(metrics, "127.0.0.1", 0)
    assert endpoint is not None
    try:
        async with served_vllm(StubAsyncLLM(config), metrics=metrics) as served:

            async def figures() -> Figures:
                return await asyncio.to_thread(scrape, endpoint.port)

            idle = await figures()
            counters = {name for name, kind in idle.types.items() if kind == "counter"}
            assert {f"dropped_{reason}_total" for reason in REASONS} < counters
            assert {f"{n}_total" for n in ("forwarded", "gaps", "replays", "losses")} < counters
            assert {"data_loss_total", "out_of_range_total"} < counters
            assert idle.values["subscribers"] == idle.values["forwarded_total"] == 0

            request = common_pb2.SubscribeKvEventsRequest()
            readers = [
                Subscription(served.stub.SubscribeKvEvents(request, timeout=30)) for _ in range(2)
            ]
            publisher.publish(payload(stored([1]), stored([2], medium="TAPE"), stored([])))
            publisher.publish(payload(stored([3])), heard=False)
            publisher.publish(payload(stored([4])))
            for reader in readers:
                await reader.read(3)
            busy = await figures()
            assert busy.values["forwarded_total"] == 3
            assert busy.values["dropped_unknown_medium_total"] == 1
            assert busy.values["dropped_placeholder_total"] == 1
            assert busy.values["dropped_malformed_total"] == 0
            assert busy.values["batches_total"] == 3
            assert busy.values["gaps_total"] == 1
            assert busy.values["replays_total"] >= 1
            assert busy.values["live_blocks"] == 3
            assert busy.values["subscribers"] == 2
            assert busy.values["lag_batches"] == 0
            assert {busy.types[name] for name in ("lag_batches", "live_blocks")} == {"gauge"}

            # Two readers that read no more fall behind what is published.
            for at in range(400):
                publisher.publish(payload(*(stored([1000 * at + n]) for n in range(1, 400))))
            lag = 0.0
            while not lag:
                lag = (await figures()).values["lag_batches"]
            for reader in readers:
                reader.call.cancel()
            events = served.servicer.kv_events
            assert events is not None
            await until(lambda: not events.statistics()["subscribers"])
            assert (await figures()).values["lag_batches"] == 0
    finally:
        endpoint.close()
        publisher.close()
