"""The one server: build, bind, bring up, serve, drain, stop.

Order at the start: the port is bound and answers NOT_SERVING, then the engine loads, then it is
warmed, then SERVING. Order at the end: NOT_SERVING and no new work, running requests go on until
there are none or the bound, what is left is cut with UNAVAILABLE, the listener closes, the engine
is closed. `serve` returns the exit code: 0 after a stop, 1 when the engine died.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from smg_grpc_servicer.core import network, wakeups
from smg_grpc_servicer.core.auth import BearerAuth, GivenTokens, TokenFile
from smg_grpc_servicer.core.binding import bind, channel_options, warn_if_open
from smg_grpc_servicer.core.errors import Unavailable
from smg_grpc_servicer.core.health import HealthServicer, StatusBoard
from smg_grpc_servicer.core.metrics import Metrics
from smg_grpc_servicer.core.metrics_server import MetricsServer, require_extra
from smg_grpc_servicer.core.options import ServerOptions
from smg_grpc_servicer.core.process import ExitGuard, signals
from smg_grpc_servicer.core.tls import CertificateSource

log = logging.getLogger(__name__)

STOP_GRACE = 1.0
"""Seconds in which calls that were cut get their status out before they are cancelled."""
LAME_DUCK = 0.1
"""Seconds for which the server goes on refusing calls after its drain."""
YOUNG = 10_000
"""Objects that may be new before Python looks for garbage among them."""


async def _nothing() -> None:
    return None


@dataclass(frozen=True, slots=True)
class Life:
    """What the server does to what it serves. `start`, `warm_up`, `close` are an `Engine`'s."""

    start: Callable[[], Awaitable[None]] = _nothing
    warm_up: Callable[[], Awaitable[None]] = _nothing
    close: Callable[[], Awaitable[None]] = _nothing
    cut: Callable[[Exception], None] = lambda error: None
    """End every open stream with an error, now (`RequestTable.cut_all`)."""
    kill: Callable[[], None] = lambda: None
    """The last act before the process is ended by force: end child processes. Must not block."""


class GrpcServer:
    """Add services, then `serve`; or `bind` and `stop` where somebody else runs the show."""

    def __init__(
        self,
        options: ServerOptions,
        board: StatusBoard,
        metrics: Metrics | None = None,
    ) -> None:
        self.options = options
        self.board = board
        self.health = HealthServicer(board)
        self.address: network.Address | None = None
        """Where to dial it, once bound."""
        self._metrics = metrics
        self._metrics_server: MetricsServer | None = None
        self._registrations: list[Callable[[grpc.aio.Server], None]] = []
        self._names: list[str] = []
        self._server: grpc.aio.Server | None = None
        self._wake = asyncio.Event()
        self._stop_reason: str | None = None

    def add(self, register: Callable[[grpc.aio.Server], None], *names: str) -> None:
        """A service: how it is added to a server, and its full names (health and reflection)."""
        self._registrations.append(register)
        self._names += names
        self.health.add(*names)

    async def bind(self) -> network.Address:
        """Listen and answer; the board decides what. The address to dial.

        :raises ConfigError: the port is in use, a file does not work, the host is not ours.
        """
        options = self.options
        if options.metrics_port is not None:
            require_extra()
        interceptors: list[grpc.aio.ServerInterceptor] = []
        if options.needs_token:
            sources: list[TokenFile | GivenTokens] = [GivenTokens(options.auth_tokens)]
            if options.auth_token_file is not None:
                sources.append(TokenFile(options.auth_token_file))
            interceptors.append(BearerAuth(*sources))
        credentials = None
        if options.tls is not None:
            credentials = CertificateSource(options.tls).credentials()
        server = wakeups.server(
            interceptors=interceptors,
            options=channel_options(options.max_receive_bytes, options.max_send_bytes),
            maximum_concurrent_rpcs=options.max_concurrent_rpcs,
        )
        health_pb2_grpc.add_HealthServicer_to_server(self.health, server)
        for register in self._registrations:
            register(server)
        if options.reflection:
            health_name = health_pb2.DESCRIPTOR.services_by_name["Health"].full_name
            names = (*self._names, health_name, reflection.SERVICE_NAME)
            reflection.enable_server_reflection(names, server)
        port = bind(server, options.host, options.port, credentials)
        await server.start()
        self._server = server
        self.address = network.Address(options.host, port).dialable
        self._start_metrics()
        warn_if_open(
            options.host,
            encrypted=options.tls is not None,
            authenticated=options.needs_token
            or (options.tls is not None and options.tls.client_ca is not None),
        )
        scheme = "grpc" if options.tls is None else "grpcs"
        log.info("listening on %s://%s%s", scheme, self.address, network.beside(options.host))
        return self.address

    def request_stop(self, reason: str) -> None:
        """Begin the drain; what a signal does. Returns at once, may come twice."""
        if self._stop_reason is None:
            self._stop_reason = reason
            self._wake.set()

    async def serve(self, life: Life, *, owns_process: bool = False) -> int:
        """Bring up, serve until asked to stop or the engine dies, drain, stop; the exit code.

        `owns_process` makes it hear signals and end a process that hangs on its way out.

        :raises ConfigError: see `bind`, or what `life.start` found in its settings.
        :raises Exception: what `life.start` raised; everything is closed before it goes on.
        """
        with contextlib.ExitStack() as stack:
            if owns_process:
                stack.enter_context(signals(self.request_stop, life.kill))
            stack.callback(self.board.subscribe(self._wake.set))
            if self._server is None:
                await self.bind()
            up = asyncio.create_task(self._bring_up(life))
            up.add_done_callback(lambda _: self._wake.set())
            guard = ExitGuard(self.options.exit_guard_seconds if owns_process else 0, life.kill)
            try:
                await self._until(lambda: self._over(up))
                if self._failure(up) is None:
                    await self._drain()
            finally:
                code = 1 if self._failure(up) is not None or self.board.death is not None else 0
                guard.arm(code)
                await self._tear_down(life, up)
            failure = self._failure(up)
            if failure is not None:
                raise failure
            # The engine may also have died while draining.
            code = 1 if self.board.death is not None else 0
            log.info("stopped, exit code %d", code)
            return code

    async def stop(self, grace: float = STOP_GRACE) -> None:
        """Close the listener and end the calls that are left; for those who only used `bind`."""
        self.board.draining()
        self.board.stopped()
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None

    async def _bring_up(self, life: Life) -> None:
        await life.start()
        self.board.warming()
        await life.warm_up()
        # What is loaded by now stays. Looking for garbage through all of torch and an engine takes
        # 0.3 s, for which every stream would wait.
        gc.collect()
        gc.freeze()
        # A step's outputs for some hundred streams are no garbage while they are on their way.
        young, *older = gc.get_threshold()
        if 0 < young < YOUNG:
            gc.set_threshold(YOUNG, *older)
        self.board.serving()

    def _over(self, up: asyncio.Task[None]) -> bool:
        dead = self.board.death is not None and self.options.exit_on_engine_death_seconds > 0
        return self._stop_reason is not None or dead or self._failure(up) is not None

    def _failure(self, up: asyncio.Task[None]) -> BaseException | None:
        return up.exception() if up.done() and not up.cancelled() else None

    async def _drain(self) -> None:
        board, options = self.board, self.options
        seconds = options.drain_seconds
        if board.death is not None:
            seconds = min(seconds, options.exit_on_engine_death_seconds)
        board.draining()
        if board.in_flight:
            log.info("draining: %d in flight, for up to %g s", board.in_flight, seconds)
        if not await self._until(lambda: board.in_flight == 0, seconds):
            log.warning("the drain is over, %d unfinished", board.in_flight)
        # Calls that have arrived but not reached their handler would end CANCELLED; they get
        # their UNAVAILABLE first.
        await asyncio.sleep(LAME_DUCK)

    async def _tear_down(self, life: Life, up: asyncio.Task[None]) -> None:
        if not up.done():
            up.cancel()
            await asyncio.wait({up}, timeout=STOP_GRACE)
        if self.board.in_flight:
            life.cut(Unavailable("the server is stopping"))
        try:
            await self.stop()
        finally:
            await life.close()

    async def _until(self, condition: Callable[[], bool], seconds: float | None = None) -> bool:
        """Wait for a condition that `_wake` announces; False when the time ran out first."""
        # A timer may fire a little before its time by the clock, so the clock is not asked.
        expired = asyncio.Event()

        def expire() -> None:
            expired.set()
            self._wake.set()

        timer = None
        if seconds is not None:
            timer = asyncio.get_running_loop().call_later(seconds, expire)
        try:
            while not condition():
                if expired.is_set():
                    return False
                self._wake.clear()
                await self._wake.wait()
            return True
        finally:
            if timer is not None:
                timer.cancel()

    def _start_metrics(self) -> None:
        options = self.options
        if options.metrics_port is None or self._metrics is None:
            return
        host = options.metrics_host or options.host
        self._metrics_server = MetricsServer.start(self._metrics, host, options.metrics_port)
