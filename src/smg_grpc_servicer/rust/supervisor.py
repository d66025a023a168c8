"""Start the Rust server and the engine, watch both, and end both.

    port bound → engine started → engine connected → [warmed up] → serving → … → drained → stopped

Exit codes: 0 asked to stop and did, 1 the engine or the server failed. The order at the end is the
same whatever the reason: health goes down, requests in flight may finish (only when asked to stop),
the server cuts what is left, the engine gets SIGTERM, then SIGKILL, and so does what it left.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import threading
from collections.abc import Callable
from time import monotonic
from typing import TypeVar

from smg_grpc_servicer.core import network
from smg_grpc_servicer.core.process import SIGNALS, ExitGuard
from smg_grpc_servicer.rust import connections, handshake, socket_dir
from smg_grpc_servicer.rust.binding import RunningServer, load_binding
from smg_grpc_servicer.rust.endings import Stop, Watch
from smg_grpc_servicer.rust.plan import EngineAddress, Keyword, RustPlan, WarmUp
from smg_grpc_servicer.rust.processes import Family
from smg_grpc_servicer.rust.socket_dir import Sockets

log = logging.getLogger(__name__)

STARTING_LOOK = 0.1
"""How often the server is asked for its state, which it cannot tell by itself: while it starts."""
SERVING_LOOK = 0.5
DRAIN_LOOK = 0.02
STARTING_FAMILY_LOOK = 1.0
FAMILY_LOOK = 5.0
STOP_SECONDS = 5.0
"""What the binding may take to end streams."""
KILLED_SECONDS = 5.0
"""What the kernel may take to end a killed process."""
REST_SECONDS = 1.0
"""What helpers of an engine that ended may take to end too."""
RELAY_SECONDS = 30.0
"""How long a warm-up waits for the KV relay: events of its blocks would be lost before."""
EXIT_SECONDS = 8.0
"""What the rest of the process may take after `serve`."""
ASKED = {None, 0, *(-each for each in SIGNALS), *(128 + each for each in SIGNALS)}
"""Exit codes of an engine that somebody asked to stop, and None of one that runs."""

T = TypeVar("T")


async def serve(plan: RustPlan, *, owns_process: bool = True) -> int:
    """Serve until asked to stop or the engine fails; the exit code.

    `owns_process`: nothing of this process is needed afterwards, so a hang may end it.

    :raises ConfigError: a setting that cannot work (exit code 2); nothing is left running.
    """
    woken = asyncio.Event()
    stop = Stop()
    with stop.heard(woken.set):
        binding = load_binding(plan.server_class)
        arguments = binding.fit(_keywords(plan))
        sockets = socket_dir.open_folder(plan.knobs.socket_dir, plan.socket_prefix)
        try:
            with handshake.address(plan, sockets) as address:
                arguments |= _addresses(plan, sockets, address)
                server = binding.start(arguments)
                log.info(
                    "listening on grpc://%s with %s; the engine starts",
                    server.address,
                    binding.wheel,
                )
                if server.metrics_address is not None:
                    log.info("metrics on http://%s/metrics", server.metrics_address)
                if not network.is_loopback(plan.host):
                    log.warning(
                        "other machines can reach %s; the Rust server has no TLS and no tokens",
                        server.address,
                    )
                run = Supervision(plan, server, stop, woken)
                code = await run.all(address)
        finally:
            sockets.remove()
    if owns_process:
        ExitGuard(EXIT_SECONDS, stop.last_act).arm(code)
    return code


def _keywords(plan: RustPlan) -> dict[str, Keyword]:
    knobs = plan.knobs
    own: dict[str, Keyword] = {
        "engine_count": Keyword(plan.engine_count, required=plan.engine_count > 1),
        "tokenizer_dir": Keyword(None if plan.tokenizer_dir is None else str(plan.tokenizer_dir)),
    }
    bounds = {
        "startup_seconds": "engine_startup_timeout_secs",
        "startup_ceiling_seconds": "engine_startup_ceiling_secs",
        "silence_seconds": "engine_silence_timeout_secs",
        "prefill_tokens_per_second": "engine_prefill_tokens_per_sec",
    }
    for name, keyword in bounds.items():
        # The binding has the same defaults, so only what somebody chose has to be known to it.
        if name in knobs.asked:
            own[keyword] = Keyword(getattr(knobs, name), asked=knobs.asked[name])
    if plan.metrics is not None:
        own["metrics_bind_address"] = Keyword(str(plan.metrics), asked=plan.metrics_asked)
    return {**plan.keywords, **own}


def _addresses(plan: RustPlan, sockets: Sockets, address: EngineAddress) -> dict[str, object]:
    return {
        "bind_address": network.join(plan.host, plan.port),
        "ipc_base_url": sockets.base_url,
        "handshake_address": address.url,
        "model_path": plan.model_path,
    }


class Supervision:
    """One server and its engine, from the start of the engine to the end of both."""

    def __init__(
        self, plan: RustPlan, server: RunningServer, stop: Stop, woken: asyncio.Event
    ) -> None:
        self._plan = plan
        self._server = server
        self._stop = stop
        self._woken = woken
        self._family = Family()
        self._watch: Watch | None = None
        self._looked = 0.0
        stop.last_act = self._family.kill

    async def all(self, address: EngineAddress) -> int:
        """Start, serve and end; the exit code."""
        failure: str | None = ""  # whatever is raised tells by itself
        try:
            if self._plan.warm_up is not None:
                self._server.set_ready(False)
            failure = await self._until_end(address)
        finally:
            # Also when the launch raised or we are cancelled: no engine stays behind.
            failed = await asyncio.shield(self._end(failure))
        return 1 if failed else 0

    async def _until_end(self, address: EngineAddress) -> str | None:
        """None when we were asked to stop, what failed otherwise."""
        if self._stop.asked():
            return None
        processes = self._plan.launch(address)
        self._family.asked_for(process.pid for process in processes)
        self._watch = Watch(processes, self._woken.set)
        started = monotonic()
        look_seconds = min(STARTING_FAMILY_LOOK, self._plan.knobs.startup_seconds / 4)
        while not self._server.engine_ready:
            if self._stop.asked():
                return None
            if (failure := self._failure()) is not None:
                return failure
            if self._time_to_look(look_seconds) and await self._off_loop(self._family.progress):
                self._server.note_engine_alive()
            await self._pause(STARTING_LOOK)
        log.info("the engine connected after %.1f s", monotonic() - started)
        warming = asyncio.create_task(self._serving())
        try:
            while not self._stop.asked():
                if warming.done():
                    warming.result()
                if (failure := self._failure()) is not None:
                    return failure
                if self._time_to_look(FAMILY_LOOK):
                    await self._off_loop(self._family.look)
                await self._pause(SERVING_LOOK)
            return None
        finally:
            warming.cancel()
            await asyncio.wait([warming])

    def _failure(self) -> str | None:
        ended = None if self._watch is None else self._watch.ended()
        if ended is not None:
            return ended
        if (error := self._server.last_error) is not None:
            return f"the server has no engine: {error}"
        return None if self._server.running else "the server ended by itself"

    async def _serving(self) -> None:
        if self._plan.warm_up is not None:
            await self._warm_up(self._plan.warm_up)
            self._server.set_ready(True)
        log.info("serving on grpc://%s", self._server.address)

    async def _warm_up(self, warm_up: WarmUp) -> None:
        until = monotonic() + RELAY_SECONDS
        while not self._server.relay_connected and monotonic() < until:  # noqa: ASYNC110
            # There is nothing to wait on, and `_pause` would take a wake-up from who waits for it.
            await asyncio.sleep(STARTING_LOOK)
        host, _, port = self._server.address.rpartition(":")
        address = network.Address(host.strip("[]"), int(port)).dialable
        try:
            await warm_up(str(address))
        except Exception:
            log.exception("the warm-up failed; serving without it")

    async def _end(self, failure: str | None) -> bool:
        """The whole way down; whether anything failed."""
        if failure:
            log.error("%s; stopping", failure)
        self._server.set_serving(False)
        if failure is None and self._server.engine_ready:
            await self._drain()
        await self._stop_server()
        died = self._died_unasked()
        # A killed process loses its sockets, by which the server knows, before it is seen to end.
        died = await self._end_engine() or died
        if failure is None and (failure := died) is not None:
            log.error("while draining: %s", failure)
        if self._watch is not None:
            self._watch.close()
        log.info("stopped")
        return failure is not None

    async def _drain(self) -> None:
        """Let requests end by themselves, while there is an engine that can end them."""
        until = monotonic() + self._plan.knobs.drain_seconds
        while (active := self._active()) and self._failure() is None:
            if self._stop.hurry or monotonic() >= until:
                what = "connections" if self._server.active_requests is None else "requests"
                log.warning("the drain is over; %s that are cut: %d", what, active)
                return
            await self._pause(DRAIN_LOOK)

    def _died_unasked(self) -> str | None:
        """How the engine ended, unless it was asked to by whoever asked us, as a group is."""
        if self._watch is None or set(self._watch.codes()) <= ASKED:
            return None
        return self._watch.ended()

    def _active(self) -> int:
        active = self._server.active_requests
        if active is None:
            # A wheel that does not count. Without a connection there is no request.
            active = connections.count(int(self._server.address.rpartition(":")[2]))
        return 1 if active is None else active

    async def _stop_server(self) -> None:
        """In a thread of its own: one that hangs must not keep the process."""
        done = asyncio.Event()
        loop = asyncio.get_running_loop()

        def stop() -> None:
            try:
                self._server.stop(STOP_SECONDS)
            finally:
                with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waited
                    loop.call_soon_threadsafe(done.set)

        threading.Thread(target=stop, name="stop-server", daemon=True).start()
        try:
            await asyncio.wait_for(done.wait(), 2 * STOP_SECONDS)
        except asyncio.TimeoutError:
            log.error("the server did not stop within %g s", 2 * STOP_SECONDS)

    async def _end_engine(self) -> str | None:
        """SIGTERM, then SIGKILL; how it ended if somebody else killed it."""
        killed: str | None = None
        await self._off_loop(self._family.look)
        if self._watch is not None:
            self._watch.signal(signal.SIGTERM)
            bound = self._plan.engine_exit_seconds
            if not await self._ended(bound, or_hurry=True):
                if not self._stop.hurry:
                    log.warning("the engine did not end within %g s of SIGTERM; killing it", bound)
                self._watch.signal(signal.SIGKILL)
                await self._ended(KILLED_SECONDS)
            elif -signal.SIGKILL in self._watch.codes():
                killed = self._watch.ended()
        since = monotonic()
        while left := await self._off_loop(self._family.look):
            seconds = monotonic() - since
            if seconds > REST_SECONDS + KILLED_SECONDS:
                log.error("%d processes of the engine are left", left)
                break
            if seconds > REST_SECONDS or self._stop.hurry:
                self._family.kill()
            await asyncio.sleep(DRAIN_LOOK)
        return killed

    async def _ended(self, seconds: float, *, or_hurry: bool = False) -> bool:
        """Whether all processes of the engine's own end in that time."""
        assert self._watch is not None
        until = monotonic() + seconds
        while None in self._watch.codes():
            left = until - monotonic()
            if left <= 0 or (or_hurry and self._stop.hurry):
                return False
            await self._pause(left)
        return True

    async def _pause(self, seconds: float) -> None:
        """Until something happened, at most so long."""
        with contextlib.suppress(asyncio.TimeoutError):
            await asyncio.wait_for(self._woken.wait(), seconds)
        self._woken.clear()

    def _time_to_look(self, seconds: float) -> bool:
        due = monotonic() - self._looked >= seconds
        if due:
            self._looked = monotonic()
        return due

    @staticmethod
    async def _off_loop(look: Callable[[], T]) -> T:
        """/proc of a large machine takes a while to read."""
        return await asyncio.to_thread(look)
