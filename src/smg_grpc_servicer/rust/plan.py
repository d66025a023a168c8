"""What a wing says about a launch, and what the supervisor asks of a wing's engine.

Durations are seconds. Values only: nothing here binds, starts or reads the environment.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from smg_grpc_servicer.core.network import Address, parse_port
from smg_grpc_servicer.rust.knobs import RustKnobs


@dataclass(frozen=True, slots=True)
class Keyword:
    """One keyword argument of the binding's constructor. A value of None is never passed."""

    value: object
    required: bool = False
    """Without it requests would be answered wrongly: a wheel that lacks it is refused."""
    asked: str | None = None
    """The flag or variable an operator set it with: what they asked for is honoured or refused."""
    names: str = ""
    """What it is for, in words that follow "no" in a line to the operator."""


@dataclass(frozen=True, slots=True)
class EngineAddress:
    """Where an engine dials the handshake: `tcp://HOST:PORT`, or `ipc://PATH`."""

    url: str

    @property
    def is_ipc(self) -> bool:
        return self.url.startswith("ipc://")

    @property
    def host(self) -> str:
        """Of a `tcp://` handshake."""
        return self._tcp.host

    @property
    def port(self) -> int:
        """Of a `tcp://` handshake."""
        return self._tcp.port

    @property
    def _tcp(self) -> Address:
        host, _, port = self.url.removeprefix("tcp://").rpartition(":")
        return Address(host.strip("[]"), parse_port(port))


class EngineProcess(Protocol):
    """A child of ours without which the engine is dead. `subprocess.Popen` is one."""

    @property
    def pid(self) -> int: ...

    def poll(self) -> int | None:
        """None while it runs; its exit code, or minus the signal that ended it. Reaps it."""


Launch = Callable[[EngineAddress], Sequence[EngineProcess]]
"""Starts the engine and returns its processes at once; the end of any of them is its end. Called on
the event loop's thread, which is the one whose end the kernel tells to children, so nothing may
start the engine from a pool's thread."""

WarmUp = Callable[[str], Coroutine[Any, Any, None]]
"""Warms the server at `host:port` up. It serves afterwards, whatever comes of it."""


@dataclass(frozen=True, slots=True)
class RustPlan:
    """One launch on the Rust path, checked; nothing is bound yet."""

    engine: str
    """As in its variables and log lines: `vllm`, `sglang`, `tokenspeed`."""
    server_class: str
    """The binding's class, `VllmGrpcServer`."""
    model_path: str
    host: str
    port: int
    launch: Launch
    knobs: RustKnobs
    keywords: Mapping[str, Keyword] = field(default_factory=dict)
    """All but the addresses, the model's path, `engine_count`, `tokenizer_dir`, the knobs' own and
    `metrics_bind_address`: those are the supervisor's."""
    engine_count: int = 1
    tokenizer_dir: Path | None = None
    metrics: Address | None = None
    metrics_asked: str = "--metrics-port"
    """How the operator asked for metrics."""
    warm_up: WarmUp | None = None
    ipc_handshake: bool = False
    """The engine can dial an `ipc://` handshake; otherwise a port on 127.0.0.1 is used."""
    socket_prefix: str = "servicer"
    """Of its files in the socket folder."""
    engine_exit_seconds: float = 30.0
    """How long the engine may take to end after SIGTERM."""
