"""W3C trace context from a call's metadata, and spans when OpenTelemetry is asked for.

`trace_context` takes `traceparent` and `tracestate` and nothing else, checked against the W3C
recommendation (https://www.w3.org/TR/trace-context/); what is invalid is dropped, never repaired.
`configure` is off unless an exporter is named in OpenTelemetry's own variables and its packages
(extra `otel`) are installed; a span then costs about 0.1 ms, and nothing before.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager
from typing import Any

TRACEPARENT = "traceparent"
TRACESTATE = "tracestate"

_MAX_TRACEPARENT = 128
_MAX_TRACESTATE = 512
_MAX_MEMBERS = 32
_PARENT = re.compile(
    r"(?P<version>[0-9a-f]{2})-(?P<trace>[0-9a-f]{32})-(?P<span>[0-9a-f]{16})-[0-9a-f]{2}"
    r"(?P<more>-.*)?"
)
_MEMBER = re.compile(
    r"(?P<key>[a-z0-9][a-z0-9_\-*/]{0,255}|[a-z0-9][a-z0-9_\-*/]{0,240}@[a-z][a-z0-9_\-*/]{0,13})"
    r"=[\x20-\x2b\x2d-\x3c\x3e-\x7e]{0,255}[\x21-\x2b\x2d-\x3c\x3e-\x7e]"
)
_ENDPOINTS = ("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT")

logger = logging.getLogger(__name__)


def trace_context(metadata: Iterable[tuple[str, str | bytes]] | None) -> dict[str, str]:
    """The valid `traceparent` and `tracestate` of `metadata`; empty when there is no parent.

    Two parents are none (the recommendation's rule); states are joined in order.
    """
    parents: list[str] = []
    states: list[str] = []
    for key, value in metadata or ():
        if isinstance(value, str):
            if key == TRACEPARENT:
                parents.append(value.strip(" \t"))
            elif key == TRACESTATE:
                states.append(value)
    if len(parents) != 1 or not _valid_parent(parents[0]):
        return {}
    state = _joined(states)
    return {TRACEPARENT: parents[0]} | ({TRACESTATE: state} if state else {})


def _valid_parent(text: str) -> bool:
    match = _PARENT.fullmatch(text) if len(text) <= _MAX_TRACEPARENT else None
    if match is None or match["version"] == "ff":
        return False
    if match["version"] == "00" and match["more"]:
        return False
    return match["trace"].strip("0") != "" and match["span"].strip("0") != ""


def _joined(states: list[str]) -> str:
    """One tracestate of all that came; "" when any part of it is invalid."""
    if sum(map(len, states)) > 2 * _MAX_TRACESTATE:  # padding aside, it could not fit
        return ""
    members = [
        member for text in states for part in text.split(",") if (member := part.strip(" \t"))
    ]
    matches = [_MEMBER.fullmatch(member) for member in members]
    keys = {match["key"] for match in matches if match}
    joined = ",".join(members)
    if len(keys) != len(members) or len(members) > _MAX_MEMBERS or len(joined) > _MAX_TRACESTATE:
        return ""
    return joined


class Spans:
    """Makes server spans; without a tracer, nothing at all."""

    def __init__(
        self,
        tracer: Any = None,
        trace_api: Any = None,
        propagator: Any = None,
        close: Callable[[], None] | None = None,
    ) -> None:
        self._tracer = tracer
        self._close = close
        self._api = trace_api
        self._propagator = propagator

    @property
    def enabled(self) -> bool:
        return self._tracer is not None

    def request(
        self, name: str, trace: Mapping[str, str], attributes: Mapping[str, str | int] | None = None
    ) -> AbstractContextManager[Any]:
        """A span over one request, the child of `trace`; a no-op when tracing is off."""
        return _OFF if self._tracer is None else self._request(name, trace, attributes)

    @contextlib.contextmanager
    def _request(
        self, name: str, trace: Mapping[str, str], attributes: Mapping[str, str | int] | None
    ) -> Iterator[Any]:
        with self._tracer.start_as_current_span(
            name,
            context=self._propagator.extract(dict(trace)),
            kind=self._api.SpanKind.SERVER,
            attributes=dict(attributes or {}),
            # An exception's text may hold what only the redacted status may say.
            record_exception=False,
            set_status_on_exception=False,
        ) as span:
            try:
                yield span
            except Exception as error:
                span.set_status(self._api.StatusCode.ERROR, type(error).__name__)
                raise

    def close(self) -> None:
        """Sends what is left. Blocks for up to the exporter's time limit: not for the loop."""
        if self._close is not None:
            self._close()


_OFF: AbstractContextManager[Any] = contextlib.nullcontext()


def configure(service: str, environ: Mapping[str, str] = os.environ) -> Spans:
    """Spans as OpenTelemetry's variables ask for; off, with one warning, when it is missing."""
    if environ.get("OTEL_SDK_DISABLED", "").strip().lower() == "true":
        return Spans()
    if not any(environ.get(name) for name in _ENDPOINTS):
        return Spans()
    try:
        api = importlib.import_module("opentelemetry.trace")
        propagation = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        sdk = importlib.import_module("opentelemetry.sdk.trace")
        close = None
        # An engine in this process may have set up tracing already: then it is its to end.
        if not isinstance(api.get_tracer_provider(), sdk.TracerProvider):
            provider = _provider(service, environ, sdk)
            api.set_tracer_provider(provider)
            close = provider.shutdown
    except ImportError as error:
        logger.warning("tracing is off: %s; install smg-grpc-servicer[otel]", error)
        return Spans()
    logger.info("tracing is on for service %s", service)
    tracer = api.get_tracer("smg_grpc_servicer")
    return Spans(tracer, api, propagation.TraceContextTextMapPropagator(), close)


def _provider(service: str, environ: Mapping[str, str], sdk: Any) -> Any:
    exporters = importlib.import_module("opentelemetry.exporter.otlp.proto.grpc.trace_exporter")
    processors = importlib.import_module("opentelemetry.sdk.trace.export")
    resources = importlib.import_module("opentelemetry.sdk.resources")
    # Resource.create lets OTEL_RESOURCE_ATTRIBUTES and OTEL_SERVICE_NAME win where they are set.
    named = {} if environ.get("OTEL_SERVICE_NAME") else {"service.name": service}
    provider = sdk.TracerProvider(resource=resources.Resource.create(named))
    provider.add_span_processor(processors.BatchSpanProcessor(exporters.OTLPSpanExporter()))
    return provider
