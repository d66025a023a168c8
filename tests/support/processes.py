"""What the system says about processes; Linux only."""

from __future__ import annotations

import contextlib
from pathlib import Path

from smg_grpc_servicer.rust.guard import NAME


def exists(pid: int) -> bool:
    """Whether that process runs; one that only its parent has to ask for does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def descendants(pid: int) -> list[int]:
    """Its children and theirs, parents first."""
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            for child in map(int, task.read_text().split()):
                found += [child, *descendants(child)]
    return found


def titles(pid: int) -> dict[int, bytes]:
    """What the processes below it call themselves."""
    found = {}
    for each in descendants(pid):
        with contextlib.suppress(OSError):
            found[each] = Path(f"/proc/{each}/cmdline").read_bytes()
    return found


def engine_of(pid: int) -> int | None:
    """The engine that the process `pid` started, whoever is its parent by now."""
    return next((each for each in _started(pid) if not _guards(each)), None)


def guard_of(pid: int) -> int | None:
    """The guard of that engine."""
    return next(filter(_guards, _started(pid)), None)


def _started(pid: int) -> list[int]:
    """The engine and its guard: the command line of both says who started them."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            words = (folder / "cmdline").read_bytes().split(b"\0") if folder.name.isdigit() else []
            if words[2:4] == [b"smg_grpc_servicer.rust.child", str(pid).encode()]:
                found.append(int(folder.name))
    return found


def _guards(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_bytes().strip() == NAME
    except OSError:
        return False
