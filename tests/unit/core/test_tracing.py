"""What is taken from a call's metadata, and that tracing costs nothing when it is off."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.core import tracing
from smg_grpc_servicer.core.tracing import Spans, configure, trace_context

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_both_keys_are_taken_and_no_other() -> None:
    metadata = (
        ("authorization", "Bearer x"),
        ("traceparent", f" {PARENT} "),
        ("tracestate", "a=1, b@c=2"),
        ("tracestate-bin", b"x"),
    )
    assert trace_context(metadata) == {"traceparent": PARENT, "tracestate": "a=1,b@c=2"}


@pytest.mark.parametrize("metadata", [None, (), (("tracestate", "a=1"),)])
def test_without_a_parent_there_is_nothing(
    metadata: tuple[tuple[str, str | bytes], ...] | None,
) -> None:
    assert trace_context(metadata) == {}


@pytest.mark.parametrize(
    "parent",
    [
        "", "x", PARENT.upper(), PARENT[:-1], PARENT + "0", PARENT + "-extra", "ff" + PARENT[2:],
        f"00-{'0' * 32}-00f067aa0ba902b7-01", f"00-4bf92f3577b34da6a3ce929d0e0e4736-{'0' * 16}-01",
        PARENT.replace("-", "_"), f"{PARENT}\n", "01" + PARENT[2:] + "-" + "x" * 200,
        "0\u0660" + PARENT[2:],
    ],
)  # fmt: skip
def test_an_invalid_parent_is_dropped_with_its_state(parent: str) -> None:
    assert trace_context((("traceparent", parent), ("tracestate", "a=1"))) == {}


def test_a_later_version_may_say_more() -> None:
    parent = "01" + PARENT[2:] + "-more"
    assert trace_context((("traceparent", parent),)) == {"traceparent": parent}


def test_two_parents_are_none_and_bytes_are_no_text() -> None:
    assert trace_context((("traceparent", PARENT), ("traceparent", PARENT))) == {}
    assert trace_context((("traceparent", PARENT.encode()),)) == {}


def test_states_are_joined_in_order() -> None:
    metadata = (("tracestate", "a=1,"), ("traceparent", PARENT), ("tracestate", " ,b=2"))
    assert trace_context(metadata)["tracestate"] == "a=1,b=2"


@pytest.mark.parametrize(
    "state",
    [
        "", ",", "a", "A=1", "a=1,a=2", "a=\u00e9", "a=1,b", "a=b=c", "=1", f"{'k' * 257}=1",
        f"a={'v' * 257}", ",".join(f"k{n}=1" for n in range(33)), f"a={'v' * 256},b={'v' * 252}",
        "a=1\x00", "a=1" * 1000,
    ],
)  # fmt: skip
def test_an_invalid_state_is_dropped_and_the_parent_stays(state: str) -> None:
    metadata = (("traceparent", PARENT), ("tracestate", state))
    assert trace_context(metadata) == {"traceparent": PARENT}


def test_limits_are_met_exactly() -> None:
    state = ",".join(f"k{n}=1" for n in range(32))
    metadata = (("traceparent", PARENT), ("tracestate", state))
    assert trace_context(metadata)["tracestate"] == state
    state = f"a={'v' * 256},b={'v' * 251}"
    assert len(state) == 512
    metadata = (("traceparent", PARENT), ("tracestate", state))
    assert trace_context(metadata)["tracestate"] == state


@given(st.lists(st.tuples(st.sampled_from(["traceparent", "tracestate", "x"]), st.text())))
def test_never_raises_and_stays_ascii(metadata: list[tuple[str, str]]) -> None:
    found = trace_context([("traceparent", PARENT), *metadata])
    assert set(found) <= {"traceparent", "tracestate"}
    assert all(value.isascii() and len(value) <= 512 for value in found.values())


# Spans


def test_off_by_default_without_importing_anything() -> None:
    code = (
        "import sys; from smg_grpc_servicer.core.tracing import configure\n"
        "spans = configure('x', {})\n"
        "with spans.request('Generate', {}) as span: assert span is None\n"
        "spans.close(); assert not spans.enabled\n"
        "assert not [m for m in sys.modules if m.startswith('opentelemetry')]"
    )
    source = str(Path(tracing.__file__).parents[2])
    subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": source}, check=True)


def test_a_missing_extra_is_one_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.trace", None)
    with caplog.at_level(logging.INFO):
        spans = configure("x", {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1"})
    assert not spans.enabled
    assert [record.levelname for record in caplog.records] == ["WARNING"]
    assert "smg-grpc-servicer[otel]" in caplog.text


def test_the_sdk_can_be_disabled() -> None:
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "TRUE"}
    assert not configure("x", environ).enabled


def test_a_span_continues_the_callers_trace_and_keeps_the_error_text_out() -> None:
    api = pytest.importorskip("opentelemetry.trace")
    sdk = pytest.importorskip("opentelemetry.sdk.trace")
    export = pytest.importorskip("opentelemetry.sdk.trace.export")
    memory = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter")
    context = pytest.importorskip("opentelemetry.trace.propagation.tracecontext")
    exporter = memory.InMemorySpanExporter()
    provider = sdk.TracerProvider()
    provider.add_span_processor(export.SimpleSpanProcessor(exporter))
    propagator = context.TraceContextTextMapPropagator()
    spans = Spans(provider.get_tracer("t"), api, propagator, provider.shutdown)
    assert spans.enabled
    with (
        pytest.raises(ValueError, match="hunter2"),
        spans.request("Generate", {"traceparent": PARENT}, {"rpc.system": "grpc"}),
    ):
        raise ValueError("hunter2")
    (span,) = exporter.get_finished_spans()
    assert f"{span.context.trace_id:x}" in PARENT
    assert f"{span.parent.span_id:016x}" in PARENT
    assert span.attributes == {"rpc.system": "grpc"}
    assert not span.events
    assert span.status.description == "ValueError"
    assert span.kind is api.SpanKind.SERVER
    assert "hunter2" not in span.to_json()
    spans.close()
