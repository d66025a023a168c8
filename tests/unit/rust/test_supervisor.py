"""The supervisor over a server that is made up: what happens around it, in which order."""

from __future__ import annotations

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.rust import supervisor
from smg_grpc_servicer.rust.knobs import RustKnobs
from smg_grpc_servicer.rust.plan import EngineAddress, EngineProcess, Keyword, RustPlan
from tests.support.processes import exists
from tests.support.wait import until

SLEEP = [sys.executable, "-c", "import time; print(flush=True); time.sleep(60)"]


class Server:
    """A server in which nothing happens unless the test says so."""

    made: Server
    active_requests = 0
    kv_relay_subscribed = True
    address = "0.0.0.0:1234"
    engine_ready = False
    running = True
    last_error: str | None = None

    def __init__(
        self,
        *,
        bind_address: str,
        ipc_base_url: str,
        handshake_address: str,
        model_path: str,
        engine_count: int = 1,
        tokenizer_dir: str | None = None,
        engine_startup_timeout_secs: float | None = None,
        metrics_bind_address: str | None = None,
    ) -> None:
        Server.made = self
        self.given = {k: v for k, v in locals().items() if k not in ("self", "__class__")}
        self.calls: list[tuple[object, ...]] = []
        self.stopping: Callable[[], object] = lambda: None

    def note_engine_alive(self) -> None:
        self.calls.append(("alive",))

    def set_serving(self, serving: bool) -> None:
        self.calls.append(("serving", serving))

    def set_ready(self, ready: bool) -> None:
        self.calls.append(("ready", ready))

    def stop(self, seconds: float) -> None:
        self.stopping()
        self.calls.append(("stop", seconds))


class Launch:
    """Starts children that sleep; keeps what it was given."""

    def __init__(self, *commands: list[str]) -> None:
        self._commands = commands or (SLEEP,)
        self.addresses: list[EngineAddress] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def __call__(self, address: EngineAddress) -> Sequence[EngineProcess]:
        self.addresses.append(address)
        self.processes += [
            subprocess.Popen(each, stdout=subprocess.DEVNULL) for each in self._commands
        ]
        return self.processes


@pytest.fixture(autouse=True)
def wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("smg.servicer")
    vars(module).update(Server=Server, __file__="/nowhere/smg/servicer.py")
    monkeypatch.setitem(sys.modules, "smg", ModuleType("smg"))
    monkeypatch.setitem(sys.modules, "smg.servicer", module)


@pytest.fixture
def launch() -> Iterator[Launch]:
    made = Launch()
    yield made
    for process in made.processes:
        process.kill()
        process.wait()


@pytest.fixture
def plan(launch: Launch) -> Iterator[RustPlan]:
    folder = Path(tempfile.mkdtemp(prefix="smg-"))
    yield RustPlan(
        engine="vllm",
        server_class="Server",
        model_path="/m",
        host="0.0.0.0",
        port=0,
        launch=launch,
        knobs=RustKnobs(socket_dir=folder / "s", drain_seconds=0.2),
        engine_exit_seconds=5,
    )
    shutil.rmtree(folder)


def start(plan: RustPlan) -> asyncio.Task[int]:
    return asyncio.create_task(supervisor.serve(plan, owns_process=False))


async def connected(launch: Launch) -> Server:
    """The server, once the engine was started and has connected."""
    await until(lambda: bool(launch.processes))
    Server.made.engine_ready = True
    return Server.made


def terminate() -> None:
    os.kill(os.getpid(), signal.SIGTERM)


async def test_the_order_of_a_life(plan: RustPlan, launch: Launch) -> None:
    serving = start(replace(plan, ipc_handshake=True, tokenizer_dir=Path("/t"), engine_count=2))
    server = await connected(launch)
    folder = plan.knobs.socket_dir
    base = f"ipc://{folder}/servicer-{os.getpid()}"
    given = {name: value for name, value in server.given.items() if value is not None}
    assert given == {
        "bind_address": "0.0.0.0:0",
        "ipc_base_url": base,
        "handshake_address": f"{base}-hs.sock",
        "model_path": "/m",
        "engine_count": 2,
        "tokenizer_dir": "/t",
    }
    assert launch.addresses == [EngineAddress(f"{base}-hs.sock")]
    terminate()
    assert await serving == 0
    calls = [call for call in server.calls if call != ("alive",)]
    assert calls == [("serving", False), ("stop", 5.0)]
    assert launch.processes[0].poll() == -signal.SIGTERM


async def test_only_chosen_bounds_are_passed(plan: RustPlan, launch: Launch) -> None:
    """The binding's own defaults are the same, and an older one knows fewer names."""
    knobs = replace(
        plan.knobs, startup_seconds=9.0, silence_seconds=9.0, asked={"startup_seconds": "SMG_X"}
    )
    serving = start(replace(plan, knobs=knobs))
    server = await connected(launch)
    assert server.given["engine_startup_timeout_secs"] == 9
    terminate()
    assert await serving == 0


async def test_a_bound_that_cannot_be_honoured(plan: RustPlan, launch: Launch) -> None:
    asked = replace(plan.knobs, asked={"silence_seconds": "SMG_X"})
    with pytest.raises(ConfigError, match="SMG_X"):
        await start(replace(plan, knobs=asked))
    assert not launch.processes


async def test_a_launch_that_fails_takes_all_down(plan: RustPlan, launch: Launch) -> None:
    """Also what it had started before it failed."""

    def fail(address: EngineAddress) -> Sequence[EngineProcess]:
        launch(address)
        raise ConfigError("--x: no")

    with pytest.raises(ConfigError, match="--x: no"):
        await start(replace(plan, launch=fail))
    assert Server.made.calls == [("serving", False), ("stop", 5.0)]
    assert not exists(launch.processes[0].pid)


async def test_cancelling_it_takes_all_down(plan: RustPlan, launch: Launch) -> None:
    serving = start(plan)
    server = await connected(launch)
    serving.cancel()
    with pytest.raises(asyncio.CancelledError):
        await serving
    assert ("stop", 5.0) in server.calls
    assert launch.processes[0].poll() == -signal.SIGTERM


@pytest.mark.parametrize("ready", [False, True], ids=["starting", "serving"])
@pytest.mark.parametrize("what", ["error", "ended", "engine"])
async def test_what_fails_is_told(
    plan: RustPlan, launch: Launch, caplog: pytest.LogCaptureFixture, ready: bool, what: str
) -> None:
    serving = start(plan)
    await until(lambda: bool(launch.processes))
    server, process = Server.made, launch.processes[0]
    server.engine_ready = ready
    if what == "error":
        server.last_error = "no HELLO"
    elif what == "ended":
        server.running = False
    else:
        process.kill()
    assert await serving == 1
    told = {
        "error": "the server has no engine: no HELLO; stopping",
        "ended": "the server ended by itself; stopping",
        "engine": f"the engine (pid {process.pid}) was ended by SIGKILL; stopping",
    }
    errors = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert errors == [told[what]]


async def test_one_of_several_processes_is_enough(plan: RustPlan) -> None:
    launch = Launch(SLEEP, SLEEP)
    serving = start(replace(plan, launch=launch))
    await connected(launch)
    launch.processes[1].kill()
    assert await serving == 1
    assert launch.processes[0].poll() == -signal.SIGTERM


async def test_a_server_that_hangs_does_not_keep_us(
    plan: RustPlan, launch: Launch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "STOP_SECONDS", 0.1)
    serving = start(plan)
    server = await connected(launch)
    over = threading.Event()
    server.stopping = over.wait
    terminate()
    assert await serving == 0
    assert launch.processes[0].poll() == -signal.SIGTERM
    over.set()


async def test_the_warm_up_gets_an_address_to_dial(plan: RustPlan, launch: Launch) -> None:
    """Not the wildcard that was bound; and it waits for the KV relay."""
    warmed: list[str] = []

    async def warm_up(address: str) -> None:
        warmed.append(address)

    serving = start(replace(plan, warm_up=warm_up))
    await until(lambda: bool(launch.processes))
    server = Server.made
    assert ("ready", False) in server.calls
    server.kv_relay_subscribed = False
    server.engine_ready = True
    # Two looks: the first finds it connected, by the second a warm-up would have begun.
    calls = len(server.calls)
    await asyncio.sleep(2.5 * supervisor.STARTING_LOOK)
    assert warmed == []
    server.kv_relay_subscribed = True
    await until(lambda: ("ready", True) in server.calls[calls:])
    assert warmed == ["127.0.0.1:1234"]
    terminate()
    assert await serving == 0


async def test_a_warm_up_that_fails_is_no_reason_not_to_serve(
    plan: RustPlan, launch: Launch, caplog: pytest.LogCaptureFixture
) -> None:
    async def warm_up(address: str) -> None:
        raise RuntimeError("cold")

    serving = start(replace(plan, warm_up=warm_up))
    server = await connected(launch)
    await until(lambda: ("ready", True) in server.calls)
    assert "the warm-up failed; serving without it" in caplog.text
    terminate()
    assert await serving == 0


async def test_a_stop_does_not_wait_for_the_warm_up(plan: RustPlan, launch: Launch) -> None:
    begun = asyncio.Event()

    async def warm_up(address: str) -> None:
        begun.set()
        await asyncio.Event().wait()

    serving = start(replace(plan, warm_up=warm_up))
    server = await connected(launch)
    await asyncio.wait_for(begun.wait(), 5)
    terminate()
    assert await serving == 0
    assert ("ready", True) not in server.calls


async def test_an_engine_stopped_with_us_is_no_failure(plan: RustPlan, launch: Launch) -> None:
    """As when a whole control group gets SIGTERM."""
    serving = start(plan)
    server = await connected(launch)
    server.active_requests = 1
    terminate()
    await until(lambda: ("serving", False) in server.calls)
    launch.processes[0].terminate()
    assert await serving == 0


async def test_an_engine_killed_in_the_drain_is_a_failure(plan: RustPlan, launch: Launch) -> None:
    """Also when the server knows first: it has no requests left, and the process is not seen to
    have ended until later.
    """
    serving = start(plan)
    server = await connected(launch)
    server.stopping = lambda: os.kill(launch.processes[0].pid, signal.SIGSTOP)
    terminate()
    await until(lambda: ("stop", 5.0) in server.calls)
    launch.processes[0].kill()
    assert await serving == 1


async def test_a_required_keyword(plan: RustPlan, launch: Launch) -> None:
    needed: dict[str, Keyword] = {"media": Keyword(1, required=True, names="media")}
    with pytest.raises(ConfigError, match="no media; install"):
        await start(replace(plan, keywords=needed))
    folder: Any = plan.knobs.socket_dir
    assert not folder.exists()
