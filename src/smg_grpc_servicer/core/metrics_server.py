"""The Prometheus endpoint: a small listener of its own, on threads of its own.

It never stops the servicer from starting or serving: a port in use is a warning, a client that
is not done `CLIENT_SECONDS` after it connected is dropped, and no more than `MAX_CLIENTS` are
answered at once. Needs the extra `metrics`; without it `ConfigError` names the extra.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from time import monotonic
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.core import network
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.metrics import Histogram, Metrics, RecordedMetrics

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric

log = logging.getLogger(__name__)

CLIENT_SECONDS = 5.0
DETAILS_SECONDS = 1.0
MAX_CLIENTS = 16
STATES = {
    "loading": "starting",
    "warming up": "warming_up",
    "serving": "serving",
    "draining": "draining",
    "stopped": "stopped",
    "dead": "dead",
    "stalled": "stalled",
}
"""`StatusBoard.condition` → the label, which is the published package's where it has one."""


def require_extra() -> None:
    """:raises ConfigError: prometheus-client is not installed."""
    try:
        import prometheus_client  # noqa: F401
    except ImportError:
        raise ConfigError(
            "--metrics-port: needs the metrics extra; "
            'install it with: pip install "smg-grpc-servicer[metrics]"'
        ) from None


def exposition(
    metrics: RecordedMetrics, accept: str = "", details: Mapping[str, int] | None = None
) -> tuple[bytes, str]:
    """The scrape's body and content type."""
    from prometheus_client.exposition import choose_encoder

    encoder, content_type = choose_encoder(accept)
    return encoder(_Registry(metrics, details or {})), content_type


class MetricsServer:
    """A listener that answers `GET /metrics`; `start` makes one, on the event loop if there is one.

    `Metrics.details` are asked for on that loop, and left out when it does not answer in time.
    """

    def __init__(self, server: _Server) -> None:
        self._server = server
        self.port: int = server.server_address[1]
        self._thread = threading.Thread(
            target=server.serve_forever, kwargs={"poll_interval": 0.1}, name="metrics", daemon=True
        )
        self._thread.start()

    @classmethod
    def start(cls, metrics: Metrics, host: str, port: int) -> MetricsServer | None:
        """Listen; None, and a warning, when that is not possible. See `require_extra` first."""
        if not isinstance(metrics, RecordedMetrics):
            return None
        try:
            server = _Server(host, port, metrics)
        except OSError as error:
            log.warning(
                "no metrics: cannot listen on %s (%s)", network.join(host, port), error.strerror
            )
            return None
        started = cls(server)
        address = network.Address(host, started.port).dialable
        log.info("metrics on http://%s/metrics%s", address, network.beside(host))
        return started

    def close(self) -> None:
        """Stop listening; returns within a fraction of a second."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(1.0)


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128  # the default of 5 makes a scraper wait behind silent clients

    def __init__(self, host: str, port: int, metrics: RecordedMetrics) -> None:
        self.metrics = metrics
        try:
            self._loop: asyncio.AbstractEventLoop | None = asyncio.get_running_loop()
        except RuntimeError:
            self._loop = None
        self.slots = threading.BoundedSemaphore(MAX_CLIENTS)
        self._deadlines: dict[socket.socket, float] = {}
        self._lock = threading.Lock()
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self.address_family, *_, address = found[0]
        super().__init__((str(address[0]), int(address[1])), _Handler)

    def details(self) -> Mapping[str, int]:
        """From a thread of ours; what they are read from belongs to the loop's."""
        if self._loop is None:
            return {}
        answer: Future[Mapping[str, int]] = Future()

        def ask() -> None:
            try:
                answer.set_result(self.metrics.details())
            except Exception as error:
                answer.set_exception(error)

        try:
            self._loop.call_soon_threadsafe(ask)
            return answer.result(DETAILS_SECONDS)
        except Exception as error:
            log.debug("a scrape goes without details: %s", type(error).__name__)
            return {}

    def process_request(self, request: Any, client_address: Any) -> None:
        if not self.slots.acquire(blocking=False):
            self.shutdown_request(request)
            return
        with self._lock:
            self._deadlines[request] = monotonic() + CLIENT_SECONDS
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread to be had
            self.slots.release()
            raise

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.slots.release()

    def service_actions(self) -> None:
        """Cut the clients whose time is over; called at each turn of `serve_forever`."""
        now = monotonic()
        # Under the lock none of them is closed, so its descriptor is still its own.
        with self._lock:
            for request, deadline in self._deadlines.items():
                if deadline <= now:
                    with contextlib.suppress(OSError):
                        request.shutdown(socket.SHUT_RDWR)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)

    def server_bind(self) -> None:
        # The base class asks DNS for its own name here, which can take seconds.
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a metrics client at %s went away", client_address)


class _Handler(BaseHTTPRequestHandler):
    timeout = CLIENT_SECONDS  # of one read or write
    server: _Server

    def do_GET(self) -> None:
        if self.path.partition("?")[0] not in ("/metrics", "/"):
            self.send_error(HTTPStatus.NOT_FOUND)
            return
        try:
            accept, details = self.headers.get("Accept", ""), self.server.details()
            body, content_type = exposition(self.server.metrics, accept, details)
        except Exception:
            log.exception("cannot write the metrics")
            self.send_error(HTTPStatus.INTERNAL_SERVER_ERROR)
            return
        self.send_response(HTTPStatus.OK)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002 - the base's name
        log.debug("metrics: %s", format % args)


class _Registry:
    """The one method of a registry that the encoders use."""

    def __init__(self, metrics: RecordedMetrics, details: Mapping[str, int]) -> None:
        self._metrics = metrics
        self._details = details

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.metrics_core import (
            CounterMetricFamily,
            GaugeMetricFamily,
            HistogramMetricFamily,
        )

        metrics = self._metrics
        names = ["engine", "model"]
        values = [metrics.engine, metrics.model]

        requests = CounterMetricFamily(
            "smg_servicer_requests",
            "Requests that ended, by finish reason and gRPC status.",
            labels=[*names, "finish_reason", "status"],
        )
        for (reason, status), count in sorted(dict(metrics.finished).items()):
            requests.add_metric([*values, reason, status], count)
        yield requests

        in_flight = GaugeMetricFamily(
            "smg_servicer_in_flight", "Requests that have not ended.", labels=names
        )
        in_flight.add_metric(values, metrics.in_flight)
        yield in_flight

        for name, text, total in (
            ("prompt_tokens", "Prompt tokens of ended requests.", metrics.prompt_tokens),
            ("cached_tokens", "Prompt tokens found in the prefix cache.", metrics.cached_tokens),
            ("generated_tokens", "Tokens generated for ended requests.", metrics.generated_tokens),
        ):
            counter = CounterMetricFamily(f"smg_servicer_{name}", text, labels=names)
            counter.add_metric(values, total)
            yield counter

        histograms: tuple[tuple[str, str, Histogram], ...] = (
            ("time_to_first_token", "From admission to the first token.", metrics.ttft),
            ("inter_token", "Between the tokens of a request.", metrics.inter_token),
            ("request", "From admission to the end.", metrics.e2e),
        )
        for name, text, histogram in histograms:
            family = HistogramMetricFamily(f"smg_servicer_{name}_seconds", text, labels=names)
            family.add_metric(values, histogram.cumulative(), histogram.total)
            yield family

        state = GaugeMetricFamily(
            "smg_servicer_state", "1 for the state the server is in.", labels=[*names, "state"]
        )
        current = metrics.state()
        for word, label in STATES.items():
            state.add_metric([*values, label], float(word == current))
        yield state

        for name, value in sorted(self._details.items()):
            kind = CounterMetricFamily if name.endswith("_total") else GaugeMetricFamily
            text = f"The servicer's own figure {name.removesuffix('_total')}."
            detail = kind(f"smg_servicer_{name}", text, labels=names)
            detail.add_metric(values, value)
            yield detail

        try:
            others = list(metrics.others())
        except Exception:
            log.exception("a scrape goes without the engine's own metrics")
            others = []
        yield from others
