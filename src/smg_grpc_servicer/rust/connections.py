"""How many TCP connections a local port has; Linux only, from /proc/self/net (proc_net_tcp.txt)."""

from __future__ import annotations

from pathlib import Path

TABLES = Path("/proc/self/net")
_ESTABLISHED = "01"


def count(port: int) -> int | None:
    """Connections to `port` of this machine; None where the system does not say."""
    found = 0
    for name in ("tcp", "tcp6"):
        try:
            lines = (TABLES / name).read_text().splitlines()[1:]
        except OSError:
            if name == "tcp":
                return None
            continue
        for line in lines:
            _, local, _, state, *_ = line.split()
            found += state == _ESTABLISHED and int(local.rpartition(":")[2], 16) == port
    return found
