from __future__ import annotations

import timeit
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.metrics_core import CounterMetricFamily
from prometheus_client.parser import text_string_to_metric_families

from smg_grpc_servicer.core.metrics import GAP_BOUNDS, Histogram, NullMetrics, RecordedMetrics
from smg_grpc_servicer.core.metrics_server import exposition

Samples = dict[tuple[str, ...], float]


def scrape(metrics: RecordedMetrics) -> Samples:
    """Samples by name and label values other than engine and model."""
    body, content_type = exposition(metrics)
    assert content_type.startswith("text/plain")
    samples = {}
    for family in text_string_to_metric_families(body.decode()):
        for sample in family.samples:
            labels = dict(sample.labels)
            assert (labels.pop("engine"), labels.pop("model")) == ("mlx", "demo")
            key = (sample.name, *labels.values())
            samples[key] = sample.value
    return samples


def test_what_a_request_leaves_behind() -> None:
    metrics = RecordedMetrics("mlx", "demo", state=lambda: "serving")
    for _ in range(3):
        metrics.request_started()
    metrics.tokens(4, 0.02)
    metrics.request_finished("stop", "OK", prompt=10, cached=6, generated=5, ttft=0.03, e2e=0.4)
    metrics.request_finished("", "INVALID_ARGUMENT")
    samples = scrape(metrics)
    assert samples["smg_servicer_requests_total", "stop", "OK"] == 1
    assert samples["smg_servicer_requests_total", "", "INVALID_ARGUMENT"] == 1
    assert samples["smg_servicer_in_flight",] == 1
    assert samples["smg_servicer_prompt_tokens_total",] == 10
    assert samples["smg_servicer_cached_tokens_total",] == 6
    assert samples["smg_servicer_generated_tokens_total",] == 5
    assert samples["smg_servicer_time_to_first_token_seconds_count",] == 1
    assert samples["smg_servicer_time_to_first_token_seconds_bucket", "0.025"] == 0
    assert samples["smg_servicer_time_to_first_token_seconds_bucket", "0.05"] == 1
    assert samples["smg_servicer_inter_token_seconds_count",] == 4
    assert samples["smg_servicer_inter_token_seconds_sum",] == pytest.approx(0.02)
    assert samples["smg_servicer_inter_token_seconds_bucket", "0.005"] == 4
    assert samples["smg_servicer_request_seconds_sum",] == pytest.approx(0.4)
    assert samples["smg_servicer_state", "serving"] == 1
    assert samples["smg_servicer_state", "draining"] == 0


def broken() -> list[object]:
    raise RuntimeError("the registry is closed")


def test_an_engines_own_families_stand_beside_ours(caplog: pytest.LogCaptureFixture) -> None:
    """And ours alone, when those cannot be had."""
    metrics = RecordedMetrics("mlx", "demo", state=lambda: "serving")
    own = CounterMetricFamily("vllm:steps", "Steps.", labels=["engine", "model"])
    own.add_metric(["mlx", "demo"], 7)
    metrics.others = lambda: [own]
    samples = scrape(metrics)
    assert samples["vllm:steps_total",] == 7
    metrics.others = broken
    assert scrape(metrics) == {key: value for key, value in samples.items() if "vllm" not in key[0]}
    assert "without the engine's own metrics" in caplog.text


@pytest.mark.parametrize(
    ("word", "label"), [("loading", "starting"), ("warming up", "warming_up"), ("dead", "dead")]
)
def test_states_are_the_published_ones(word: str, label: str) -> None:
    samples = scrape(RecordedMetrics("mlx", "demo", state=lambda: word))
    assert [key[1] for key, on in samples.items() if key[0] == "smg_servicer_state" and on] == [
        label
    ]


@given(st.lists(st.tuples(st.floats(0, 5), st.integers(1, 9))))
def test_a_histogram_counts_each_value_once(values: list[tuple[float, int]]) -> None:
    histogram = Histogram(GAP_BOUNDS)
    for value, times in values:
        histogram.add(value, times)
    pairs = histogram.cumulative()
    assert pairs[-1] == ("+Inf", sum(times for _, times in values))
    for bound, count in pairs[:-1]:
        assert count == sum(times for value, times in values if value <= float(bound))


def best(call: Callable[[], None]) -> float:
    """Microseconds of one call, undisturbed."""
    return min(timeit.repeat(call, number=2000, repeat=7)) / 2000 * 1e6


def test_a_message_costs_a_microsecond_or_two() -> None:
    """Metrics must not be a reason to turn metrics off: bounds are generous for a busy machine."""
    metrics = RecordedMetrics("mlx")
    assert best(lambda: metrics.tokens(3, 0.013)) < 4
    assert best(lambda: metrics.request_finished("stop", "OK", prompt=1, ttft=0.1, e2e=1)) < 8
    null = NullMetrics()
    assert best(lambda: null.tokens(3, 0.013)) < 1
