"""The binding, module `smg.servicer`, called by its own signature.

Wheels of one version differ in what they take, so a wheel is asked, never looked up. What it does
not know is left out with one WARNING; what it needs to answer rightly, or what an operator asked
for, makes a `ConfigError`. Constructing binds the port and starts Rust's threads; from then on
every child has to be spawned, not forked.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.rust.plan import Keyword

log = logging.getLogger(__name__)

MODULE = "smg.servicer"

ABILITIES = {
    "engine_startup_timeout_secs": "give up a start that shows no sign of life",
    "engine_startup_ceiling_secs": "give up a start that takes too long in all",
    "engine_silence_timeout_secs": "give up a busy engine that has fallen silent",
    "engine_prefill_tokens_per_sec": "allow for long prompts in that",
    "active_requests": "end a drain when the last request ends (else: when no client is connected)",
    "set_ready": "hold readiness back for a warm-up alone (else: requests of others are let in)",
    "kv_relay_subscribed": "tell when KV events are being read",
    "metrics_bind_address": "serve metrics",
    "kv_events_endpoint": "stream KV events",
    "media_processor": "have media processed in this process",
    "smg_media_processor": "process media by itself",
    "encode_dispatcher": "leave media to encoders elsewhere",
}
"""What wheels may lack: a keyword of the constructor or a member of the server, in words."""

NEEDED = frozenset(
    {
        *("bind_address", "ipc_base_url", "handshake_address", "model_path"),
        *("address", "engine_ready", "last_error", "running", "set_serving", "stop"),
    }
)
"""The keywords and the members that nothing works without."""


class RunningServer:
    """A constructed server. What its wheel lacks answers None or does the nearest thing."""

    def __init__(self, server: Any, members: frozenset[str]) -> None:
        self._server = server
        self._has = members

    @property
    def address(self) -> str:
        """`IP:PORT`, bound."""
        return str(self._server.address)

    @property
    def engine_ready(self) -> bool:
        """All engines have registered; stays true when one dies."""
        return bool(self._server.engine_ready)

    @property
    def last_error(self) -> str | None:
        """Why the engine cannot be served; None for an engine that died after it connected."""
        error = self._server.last_error
        return None if error is None else str(error)

    @property
    def running(self) -> bool:
        return bool(self._server.running)

    @property
    def active_requests(self) -> int | None:
        """Requests in flight; None where the wheel does not say."""
        return int(self._server.active_requests) if "active_requests" in self._has else None

    @property
    def relay_connected(self) -> bool:
        """False while a KV relay has not reached its publisher; true where nobody can say."""
        return "kv_relay_subscribed" not in self._has or bool(self._server.kv_relay_subscribed)

    @property
    def metrics_address(self) -> str | None:
        return self._server.metrics_address if "metrics_address" in self._has else None

    def note_engine_alive(self) -> None:
        """The engine showed a sign of life: its start may be silent for as long again."""
        if "note_engine_alive" in self._has:
            self._server.note_engine_alive()

    def set_serving(self, serving: bool) -> None:
        self._server.set_serving(serving)

    def set_ready(self, ready: bool) -> None:
        """Readiness alone. A wheel without it admits requests while it does not serve."""
        if "set_ready" in self._has:
            self._server.set_ready(ready)
        else:
            self._server.set_serving(ready)

    def stop(self, seconds: float = 5.0) -> None:
        """Blocks; streams that are still open end UNAVAILABLE. A second call returns at once."""
        self._server.stop(seconds)


@dataclass(frozen=True, slots=True)
class Binding:
    """One server class of the installed wheel."""

    name: str
    wheel: str
    """`smg 1.13.0`, as an operator would install it."""
    server_class: Any
    keywords: frozenset[str]
    members: frozenset[str]

    def fit(self, wanted: Mapping[str, Keyword]) -> dict[str, object]:
        """What of `wanted` the wheel takes; the rest is told in one WARNING.

        :raises ConfigError: it lacks what is required or what an operator asked for.
        """
        set_ones = {name: word for name, word in wanted.items() if word.value is not None}
        missing = {name: word for name, word in set_ones.items() if name not in self.keywords}
        faults = [f"{word.asked} ({name})" for name, word in missing.items() if word.asked]
        faults += [
            word.names or name for name, word in missing.items() if word.required and not word.asked
        ]
        if faults:
            raise ConfigError(
                f"{self.wheel}: its {self.name} has no {', no '.join(faults)}; install a newer "
                "wheel of it, leave the setting out, or use the Python servicer"
            )
        if missing:
            log.warning(
                "%s: its %s takes no %s; left out", self.wheel, self.name, ", ".join(missing)
            )
        return {name: word.value for name, word in set_ones.items() if name not in missing}

    def start(self, arguments: Mapping[str, object]) -> RunningServer:
        """Construct, which binds the port; `arguments` are those of `fit`.

        :raises ConfigError: the wheel refuses one of them, or the address cannot be bound.
        """
        try:
            return RunningServer(self.server_class(**arguments), self.members)
        except (ValueError, OverflowError, TypeError) as error:
            raise ConfigError(f"{self.wheel}: {error}") from None
        except (RuntimeError, OSError) as error:
            flags = "--metrics-port" if "metrics listener" in str(error) else "--host, --port"
            raise ConfigError(f"{flags}: {error}") from None

    def describe(self) -> list[str]:
        """What the wheel can and cannot do, a line each."""
        has = self.keywords | self.members
        lines = [f"{self.wheel}, {self.name}"]
        for name, what in ABILITIES.items():
            lines.append(f"  {'can' if name in has else 'cannot'} {what} ({name})")
        return [*lines, f"  takes {', '.join(sorted(self.keywords))}"]


def load_binding(name: str) -> Binding:
    """The class `name` of the installed wheel.

    :raises ConfigError: no wheel is installed, it cannot be loaded, or its class is not as ours.
    """
    try:
        module = importlib.import_module(MODULE)
    except ImportError as error:
        raise ConfigError(
            f"the Rust servicer needs the wheel smg ({error}); pip install smg"
        ) from None
    except Exception as error:  # half an installation, a library that does not fit
        raise ConfigError(
            f"the wheel smg cannot be loaded ({type(error).__name__}: {error}); install it anew"
        ) from None
    wheel = _wheel(module)
    server_class = getattr(module, name, None)
    if server_class is None:
        raise ConfigError(f"{wheel}: it has no {name}; install a newer one")
    try:
        keywords = frozenset(inspect.signature(server_class).parameters)
    except (TypeError, ValueError):
        raise ConfigError(f"{wheel}: its {name} does not say what it takes") from None
    members = frozenset(dir(server_class))
    if lacking := NEEDED - keywords - members:
        raise ConfigError(f"{wheel}: its {name} has no {', no '.join(sorted(lacking))}")
    return Binding(name, wheel, server_class, keywords, members)


def _wheel(module: Any) -> str:
    """Name and version of the distribution that `module` was loaded from."""
    folder = str(Path(module.__file__).parent.parent)
    found = [
        f"{each.metadata['Name']} {each.version}"
        for each in distributions(path=[folder])
        if any(str(file) == "smg/servicer.py" for file in each.files or ())
    ]
    # Two of them are two installations on top of each other: which one it is, nobody knows.
    return " or ".join(sorted(found)) or f"smg in {folder}"


def init_tracing(level: str | None = None) -> None:
    """Rust's log lines, by RUST_LOG unless `level` says; a second call does nothing."""
    # It takes any word for a filter; of one that is no level of Rust's it logs nothing at all.
    words = {"warning": "warn"}
    importlib.import_module(MODULE).init_servicer_tracing(level and words.get(level, level))
