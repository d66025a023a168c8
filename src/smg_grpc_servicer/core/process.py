"""What a process of ours does around its event loop: start it, hear signals, surely end.

Exit codes: 0 asked to stop and did, 1 a fault, 2 a setting that cannot work, 128+n ended by a
second signal n.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import faulthandler
import importlib.util
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn, TextIO

from smg_grpc_servicer.core import logs
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.redaction import redact_text

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT)


def run(main: Callable[[], Coroutine[Any, Any, int]], *, event_loop: str = "auto") -> int:
    """Run `main` on uvloop when it is wanted and there, else on asyncio; the exit code.

    `main` is called on no loop: everything of grpc.aio has to be made inside it.
    """
    try:
        return _runner(event_loop)(main())
    except ConfigError as error:
        print_config_error(error)
        return 2
    except KeyboardInterrupt:
        return 128 + signal.SIGINT
    except Exception:
        log.exception("the server ended with an error")
        return 1


def print_config_error(error: ConfigError) -> None:
    """The faults, one a line, on standard error; log lines where the log is read by machines."""
    if logs.is_json():
        for line in str(error).splitlines():
            log.error("%s", line)
        return
    write_error("".join(f"error: {line}\n" for line in str(error).splitlines()))


def write_error(text: str) -> None:
    """`text` on standard error, credentials masked; whoever cannot be told changes no exit code."""
    try:
        sys.stderr.write(redact_text(text))
        sys.stderr.flush()
    except (AttributeError, OSError, ValueError):  # there is none, it is full, it was closed
        # The text is still in the stream's buffer, and a flush that fails while the interpreter
        # ends turns every exit code into 120. A stream that is not there is not flushed.
        sys.stderr = None


def open_standard_streams() -> None:
    """Descriptors 0, 1 and 2 that were closed when the process began lead to /dev/null.

    The next file or socket would get their number otherwise: libuv aborts then, and what a library
    writes as standard error would go down a connection.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number is given out: this one, as those before it are open by now.
            opened = os.open(os.devnull, os.O_RDWR)
            assert opened == number
            os.set_inheritable(number, True)
    # Python leaves None where it found no descriptor.
    if sys.stdout is None:
        sys.stdout = _stream(1)
    if sys.stderr is None:
        sys.stderr = _stream(2)


def _stream(number: int) -> TextIO:
    return os.fdopen(number, "w", encoding="utf-8", errors="backslashreplace", closefd=False)


def _runner(event_loop: str) -> Callable[[Coroutine[Any, Any, int]], int]:
    if event_loop == "asyncio":
        return asyncio.run
    if importlib.util.find_spec("uvloop") is None:
        if event_loop == "uvloop":
            raise ConfigError(
                "--event-loop: got 'uvloop', which is not installed; allowed: auto or asyncio, or "
                'uvloop after pip install "smg-grpc-servicer[uvloop]"'
            )
        return asyncio.run
    import uvloop

    chosen: Callable[[Coroutine[Any, Any, int]], int] = uvloop.run
    return chosen


@contextlib.contextmanager
def signals(
    on_stop: Callable[[str], None], last_act: Callable[[], None] = lambda: None
) -> Iterator[None]:
    """Within it SIGTERM and SIGINT call `on_stop(name)` on the loop; a second one ends at once.

    The second one is not left to the loop, which may be what hangs: it runs `last_act` (must be
    quick) and leaves with 128 + its number.
    """
    loop = asyncio.get_running_loop()

    def first(number: signal.Signals) -> None:
        for each in SIGNALS:
            # In place of the loop's, not after removing that: there is no moment without one.
            signal.signal(each, second)
        log.info("%s: stopping; a second signal ends the process at once", number.name)
        on_stop(number.name)

    def second(number: int, _frame: FrameType | None) -> None:
        # The interrupted code may hold the log's lock, so nothing is logged.
        leave(128 + number, last_act)

    before = {each: signal.getsignal(each) for each in SIGNALS}
    for each in SIGNALS:
        loop.add_signal_handler(each, first, each)
    try:
        yield
    finally:
        for each in SIGNALS:
            loop.remove_signal_handler(each)
            signal.signal(each, before[each] or signal.SIG_DFL)


def leave(code: int, last_act: Callable[[], None]) -> NoReturn:
    """End the process now: no clean-up, no waiting for threads."""
    try:
        last_act()
    finally:
        os._exit(code)


def leave_at_exit(program: str, code: int) -> None:
    """End past the closing interpreter, with `code`, if `program` itself runs this process.

    Taking an engine's modules apart lasts seconds, and a native thread or destructor that wants the
    interpreter meanwhile can make it last for ever. A program of somebody's own ends as it likes.
    """
    main = getattr(sys.modules["__main__"], "__spec__", None)
    name = str(main.name) if main is not None else Path(sys.argv[0]).name
    if name.partition(".")[0] == program:
        atexit.register(_leave_at_exit, code)


def _leave_at_exit(code: int) -> None:
    # Set when an exception reached the top meanwhile.
    leave(1 if getattr(sys, "last_value", None) is not None else code, flush)


def flush() -> None:
    """What a closing interpreter would have written; for `leave`."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:
            stream.flush()


class ExitGuard:
    """Ends a process whose shutdown hangs: `seconds` after `arm` it dumps stacks and leaves.

    Two watchers: a thread, which can still run `last_act` (end child processes), and behind it
    the C-level timer of faulthandler, for the case that something never gives the GIL back.
    """

    def __init__(self, seconds: float, last_act: Callable[[], None] = lambda: None) -> None:
        self._seconds = seconds
        self._last_act = last_act

    def arm(self, code: int) -> None:
        """Start the count; `code` is the exit code a clean end would have had."""
        if self._seconds <= 0:
            return
        timer = threading.Timer(self._seconds, self._fire, args=(code,))
        timer.daemon = True
        timer.name = "exit-guard"
        timer.start()
        # file: sys.stderr may be replaced by something without a descriptor.
        faulthandler.dump_traceback_later(self._seconds + 2, exit=True, file=2)

    def _fire(self, code: int) -> None:
        text = f"the process did not end within {self._seconds:g} s of its drain; ending it\n"
        os.write(2, text.encode())
        faulthandler.dump_traceback(file=2, all_threads=True)
        leave(code or 1, self._last_act)
