"""The engine's processes and all that they started: found, watched for progress, ended.

A process is its number and the time it began: a number alone may be another's by now. Read from
/proc (Linux); elsewhere nothing is found and everything counts as progress. Nothing here waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from time import monotonic

_PROC = Path("/proc")
_PR_SET_CHILD_SUBREAPER = 36

WAKE_UP_BYTES = 8
"""What a write to an eventfd counts: idle threads wake each other so, and that is no output."""
BUSY = 0.02
"""The share of one CPU that an engine at work uses at least."""
READING = 2**20
"""Bytes a second that an engine which loads weights reads at least."""


@dataclass(frozen=True, slots=True)
class Process:
    """One process in /proc."""

    pid: int
    state: str
    parent: int
    cpu: int
    """Ticks of CPU time so far."""
    start: int
    """When it began, in ticks since the machine did."""

    @property
    def is_over(self) -> bool:
        """It ended, and its parent has not asked yet."""
        return self.state in "ZX"


@dataclass(frozen=True, slots=True)
class Work:
    """What one process has done so far."""

    cpu: int = 0
    written: int = 0
    """Bytes of its writes that were no wake-ups."""
    read: int = 0


def read(pid: int) -> Process | None:
    """The process with that number; None when there is none, or no /proc."""
    try:
        text = (_PROC / str(pid) / "stat").read_bytes().decode(errors="replace")
    except OSError:
        return None
    # The name stands in parentheses and may hold some itself.
    fields = text.rpartition(")")[2].split()
    return Process(
        pid=pid,
        state=fields[0],
        parent=int(fields[1]),
        cpu=int(fields[11]) + int(fields[12]),
        start=int(fields[19]),
    )


def everybody() -> dict[int, Process]:
    """All processes that can be seen, by number; empty without /proc."""
    try:
        numbers = [int(name) for name in os.listdir(_PROC) if name.isdigit()]  # noqa: PTH208
    except OSError:
        return {}
    return {pid: found for pid in numbers if (found := read(pid)) is not None}


def kill(pid: int, start: int) -> None:
    """SIGKILL for that very process; another one that has its number by now is left alone."""
    try:
        descriptor = os.pidfd_open(pid)
    except AttributeError:  # not Linux
        return
    except OSError:
        # It is gone, or the kernel is older than 5.3: then there is a moment in which it could go.
        if _is(pid, start):
            with contextlib.suppress(OSError):
                os.kill(pid, signal.SIGKILL)
        return
    try:
        if _is(pid, start):
            with contextlib.suppress(OSError):
                signal.pidfd_send_signal(descriptor, signal.SIGKILL)
    finally:
        os.close(descriptor)


def _is(pid: int, start: int) -> bool:
    found = read(pid)
    return found is not None and found.start == start


class Family:
    """The engine as processes: every child of ours that came after this was made, and theirs.

    From then on orphans below us become our children instead of init's, so none gets lost.
    """

    def __init__(self) -> None:
        self._us = os.getpid()
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        ours = (each for each in everybody().values() if each.parent == self._us)
        self._before = {(each.pid, each.start) for each in ours}
        self._members: dict[int, int] = {}
        self._asked_for: set[int] = set()
        self._work: dict[int, Work] = {}
        self._looked = monotonic()

    def asked_for(self, pids: Iterable[int]) -> None:
        """These belong to it, and somebody else waits for their exit codes."""
        for pid in pids:
            self._asked_for.add(pid)
            if (found := read(pid)) is not None:
                self._members[pid] = found.start

    def look(self) -> int:
        """Learn who belongs to it now; how many of them are running."""
        seen = everybody()
        children: dict[int, list[Process]] = {}
        for each in seen.values():
            children.setdefault(each.parent, []).append(each)
        todo = [pid for pid, start in self._members.items() if _started(seen.get(pid), start)]
        todo += [
            each.pid
            for each in children.get(self._us, ())
            if (each.pid, each.start) not in self._before
        ]
        members: dict[int, int] = {}
        while todo:
            each = seen[todo.pop()]
            if each.pid not in members:
                members[each.pid] = each.start
                todo += [child.pid for child in children.get(each.pid, ())]
        for pid in [pid for pid in members if seen[pid].is_over]:
            del members[pid]
            if seen[pid].parent == self._us and pid not in self._asked_for:
                with contextlib.suppress(OSError):
                    os.waitpid(pid, os.WNOHANG)
        self._members = members
        return len(members)

    def kill(self) -> None:
        """End every process that was seen at the last look."""
        for pid, start in self._members.items():
            kill(pid, start)

    def progress(self) -> bool:
        """Whether they have worked since the last call: written, read a lot or used a CPU.

        That a process is there, and its idle threads wake now and then, is no progress.
        """
        self.look()
        before, self._work = self._work, {pid: _work(pid) for pid in self._members}
        now = monotonic()
        seconds, self._looked = now - self._looked, now
        if self._work.keys() - before.keys() or sys.platform != "linux":
            return True
        gains = [
            (
                after.cpu - before[pid].cpu,
                after.written - before[pid].written,
                after.read - before[pid].read,
            )
            for pid, after in self._work.items()
        ]
        cpu, written, bytes_read = (
            (sum(column) for column in zip(*gains, strict=True)) if gains else (0, 0, 0)
        )
        ticks = max(1.0, BUSY * seconds * os.sysconf("SC_CLK_TCK"))
        return cpu >= ticks or written > 0 or bytes_read >= READING * seconds


def _started(process: Process | None, start: int) -> bool:
    return process is not None and process.start == start


def _work(pid: int) -> Work:
    found = read(pid)
    cpu = 0 if found is None else found.cpu
    try:
        lines = (_PROC / str(pid) / "io").read_text().splitlines()
    except OSError:  # gone, or a kernel that does not count
        return Work(cpu)
    counts = {name: int(value) for name, _, value in (line.partition(":") for line in lines)}
    written = counts["wchar"] - WAKE_UP_BYTES * counts["syscw"]
    return Work(cpu, written, max(counts["rchar"], counts["read_bytes"]))
