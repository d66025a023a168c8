"""Between a server and its engine, so that nothing of an engine is left when either has ended.

    server → guard → engine → what the engine starts

An engine cannot see to that itself: it may be stopped (SIGSTOP), hold the interpreter in native
code or be deaf to SIGTERM, and its helpers may have sessions of their own. The guard runs nothing
of the engine's. It waits, passes SIGTERM on, and is whose children orphans below it become. When
the server is gone, it asks the engine to end, then kills all that is left. When it is killed
itself, the kernel kills the engine (`die_with`), and the server what that leaves.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
import time
from typing import NoReturn

from smg_grpc_servicer.rust.processes import Family

NAME = b"smg-guard"
"""What `ps -o comm` says of it; its command line is the engine's."""
REST_SECONDS = 1.0
"""What helpers of an engine that ended may take to end too."""
LOOK_SECONDS = 0.02

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PASSED_ON = (signal.SIGTERM, signal.SIGINT)
_WAITED = {*_PASSED_ON, signal.SIGCHLD, signal.SIGCONT, signal.SIGALRM}


def die_with(parent: int, number: signal.Signals = signal.SIGKILL) -> None:
    """From now on the kernel sends us `number` when `parent`, which started us, ends.

    Linux alone does; it goes by the end of the thread that started us. SIGKILL and SIGCONT also
    reach a process that is stopped.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:
        # It ended before we could ask to be told.
        os._exit(1)


def hear_of_children() -> None:
    """Who ignores SIGCHLD never hears that a child has ended, nor how; it is inherited."""
    if signal.getsignal(signal.SIGCHLD) is signal.SIG_IGN:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def fork(parent: int, grace: float) -> None:
    """Comes back as the engine; what was the process before guards it, and ends as it did.

    For a child of `parent` without threads that leads its session. Once `parent` is gone the
    engine has `grace` seconds to end by itself.
    """
    guard = os.getpid()
    hear_of_children()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _WAITED)
    die_with(parent, signal.SIGCONT)
    family = Family()
    if (engine := os.fork()) == 0:
        die_with(guard)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    try:
        family.asked_for([engine])
        _keep(family, engine, parent, grace)
    finally:
        # Whatever happens here: only the other one goes on with what the engine is to do.
        os._exit(1)


def _keep(family: Family, engine: int, parent: int, grace: float) -> NoReturn:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, NAME)
    else:
        signal.setitimer(signal.ITIMER_REAL, 1.0, 1.0)  # nobody tells us of the server's end
    code = None
    while code is None and os.getppid() == parent:
        number = signal.sigwait(_WAITED)
        if number in _PASSED_ON:
            _ask(engine, number)
        code = _code(engine)
    if code is None:
        _ask(engine, signal.SIGTERM)
        until = time.monotonic() + grace
        while (code := _code(engine)) is None and time.monotonic() < until:
            time.sleep(LOOK_SECONDS)
    until = time.monotonic() + (0 if code is None else REST_SECONDS)
    while family.look():
        if time.monotonic() >= until:
            family.kill()
        time.sleep(LOOK_SECONDS)
    if code is None:
        # Nobody is left to be told. On other systems than Linux `family` has found nobody.
        os.killpg(0, signal.SIGKILL)
    elif code < 0:
        end_by(-code)
    os._exit(code or 0)


def _ask(engine: int, number: int) -> None:
    """It is our child and has not been waited for, so the number is its own."""
    os.kill(engine, number)
    os.kill(engine, signal.SIGCONT)  # what is stopped hears nothing else


def _code(engine: int) -> int | None:
    """As `Popen` has it; None while it runs."""
    pid, status = os.waitpid(engine, os.WNOHANG)
    return os.waitstatus_to_exitcode(status) if pid else None


def end_by(number: int) -> None:
    """End this process by the signal that ended another, which has dumped its core already."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if number != signal.SIGKILL:
        signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {number})
    os.kill(os.getpid(), number)
