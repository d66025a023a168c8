"""A publisher for an engine that was given none, so that cache-aware routing works by itself.

Token ids travel in events, so nothing of it can be reached from another machine. One rank
publishes over ipc in a folder of its own; those of servers that were killed go when the next one
starts. Several publish over loopback: their PUB sockets connect
to ours, which an endpoint without a wildcard makes them do, and each binds a replay port there.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import os
import random
import re
import shutil
import socket
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.leftovers import is_deserted, is_over
from smg_grpc_servicer.core.settings import Settings
from smg_grpc_servicer.kv_events.settings import switch

log = logging.getLogger(__name__)

ATTEMPTS = 32
FIRST_PORT = 10_000
LAST_PORT = 32_768
"""Where ephemeral ports begin on Linux by default; a server's own ports lie below."""
BUFFER_STEPS = 10_000

_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_LONGEST_PATH = 100
"""Bytes of a Unix socket's path that every system takes."""

_NAME = re.compile(r"smg-kv-(?P<pid>[0-9]+)-\w+")
_folders: list[str] = []


@dataclass(frozen=True, slots=True)
class Publisher:
    """What the engine's KV-events configuration is to say."""

    endpoint: str
    replay_endpoint: str
    buffer_steps: int = BUFFER_STEPS

    def config(self) -> dict[str, object]:
        """In the keys that vLLM, SGLang and TokenSpeed share."""
        return {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": self.endpoint,
            "replay_endpoint": self.replay_endpoint,
            "buffer_steps": self.buffer_steps,
        }


def publisher(
    engine: str,
    ranks: int,
    *,
    ipc: bool = True,
    environ: Mapping[str, str] | None = None,
) -> Publisher | None:
    """A configuration for an engine that has none; None when it is switched off.

    :param ranks: data-parallel ranks that publish, counted over all machines.
    :param ipc: whether this engine's publisher takes an ipc endpoint.
    :raises ConfigError: no ports are free, or the switch has an unknown word.
    """
    setting = switch(engine)
    if not Settings(setting).resolve(environ=environ).get_value(setting):
        log.info("KV events are off (%s)", setting.env)
        return None
    made = _over_ipc() if ipc and ranks == 1 else None
    if made is None:
        first = free_ports(2 * ranks)
        made = Publisher(f"tcp://127.0.0.1:{first}", f"tcp://127.0.0.1:{first + ranks}")
    log.info(
        "KV events are on for cache-aware routing: %s, on this machine only; "
        "--kv-events-config sets another publisher, %s=off none",
        made.endpoint,
        setting.env,
    )
    return made


def _over_ipc() -> Publisher | None:
    _sweep(Path(tempfile.gettempdir()))
    folder = tempfile.mkdtemp(prefix=f"smg-kv-{os.getpid()}-")
    _folders.append(folder)
    if len(os.fsencode(folder)) > _LONGEST_PATH - len("/replay"):
        return None
    return Publisher(f"ipc://{folder}/events", f"ipc://{folder}/replay")


def _sweep(parent: Path) -> None:
    """Remove folders with sockets that nobody listens on and whose server is gone."""
    with contextlib.suppress(OSError):
        for folder in parent.glob("smg-kv-*"):
            named = _NAME.fullmatch(folder.name)
            if named and str(folder) not in _folders and is_over(int(named["pid"])):
                _remove_deserted(folder)


def _remove_deserted(folder: Path) -> None:
    with contextlib.suppress(OSError):  # somebody else's, or just gone
        status = folder.lstat()
        if stat.S_ISDIR(status.st_mode) and status.st_uid == os.geteuid():
            sockets = list(folder.iterdir())
            # An empty one may be about to be used, by a server whose number is not known here.
            if sockets and all(map(is_deserted, sockets)):
                shutil.rmtree(folder, ignore_errors=True)


def clean() -> None:
    """Remove what was made for sockets; servers that leave without `atexit` call it."""
    while _folders:
        shutil.rmtree(_folders.pop(), ignore_errors=True)


atexit.register(clean)


def free_ports(count: int) -> int:
    """The first of `count` consecutive loopback ports that nobody holds now.

    :raises ConfigError: there are none.
    """
    end = _ephemeral()
    for _ in range(ATTEMPTS):
        if end - FIRST_PORT < count:
            break
        first = random.randrange(FIRST_PORT, end - count + 1)
        if all(_is_free(port) for port in range(first, first + count)):
            return first
    raise ConfigError(
        f"--kv-events-config: not given, and no {count} consecutive ports are free between "
        f"{FIRST_PORT} and {end} for the publisher that is then set up"
    )


def _ephemeral() -> int:
    """Where ephemeral ports begin, which would be given to anybody meanwhile."""
    try:
        low = int(_RANGE.read_text().split()[0])
    except (OSError, ValueError, IndexError):
        return LAST_PORT
    if low <= FIRST_PORT:
        log.warning(
            "%s begins at %d: ports for KV events are drawn from %d to %d and may be taken by "
            "outgoing connections",
            _RANGE,
            low,
            FIRST_PORT,
            LAST_PORT,
        )
        return LAST_PORT
    return low


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True
