"""What ends a server: a signal to us, or the end of an engine process. Both wake the loop."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from collections.abc import Callable, Iterator, Sequence
from types import FrameType

from smg_grpc_servicer.core.children import end_descriptor, in_words
from smg_grpc_servicer.core.process import SIGNALS, leave
from smg_grpc_servicer.rust.plan import EngineProcess

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.1
"""How often processes are asked where the kernel has no pidfd."""


class Stop:
    """Signals to us. The first asks to stop, the second not to wait, the third ends us at once."""

    def __init__(self) -> None:
        self.hurry = False
        """Whether there was a second one."""
        self._asked = False
        self.last_act: Callable[[], None] = lambda: None
        self._wake: Callable[[], None] = lambda: None

    def asked(self) -> bool:
        """Whether there was a signal."""
        return self._asked

    @contextlib.contextmanager
    def heard(self, wake: Callable[[], None]) -> Iterator[None]:
        """Listen; `wake` is called on the loop after each."""
        loop = asyncio.get_running_loop()
        before = {each: signal.getsignal(each) for each in SIGNALS}
        self._wake = wake
        for each in SIGNALS:
            loop.add_signal_handler(each, self._hear, each)
        try:
            yield
        finally:
            for each in SIGNALS:
                loop.remove_signal_handler(each)
                signal.signal(each, before[each] or signal.SIG_DFL)

    def _hear(self, number: signal.Signals) -> None:
        if not self._asked:
            self._asked = True
            log.info("%s: stopping; a second signal cuts running requests", number.name)
        elif not self.hurry:
            self.hurry = True
            log.warning("%s: not waiting any longer; a third signal ends at once", number.name)
            for each in SIGNALS:
                # Over the loop's own, which may be what hangs. Not after its removal: for a moment
                # the system's would be in force, and would end us without `last_act`.
                signal.signal(each, self._third)
        else:
            self._third(number, None)  # it came before the second one was heard
        self._wake()

    def _third(self, number: int, _frame: FrameType | None) -> None:
        leave(128 + number, self.last_act)


class Watch:
    """The engine's own processes. `wake` is called on the loop soon after one ended."""

    def __init__(self, processes: Sequence[EngineProcess], wake: Callable[[], None]) -> None:
        self._processes = tuple(processes)
        self._loop = asyncio.get_running_loop()
        self._wake = wake
        self._descriptors: list[int] = []
        self._timer: asyncio.TimerHandle | None = None
        blind = False
        for process in self._processes:
            descriptor = end_descriptor(process.pid)
            if descriptor is None:
                blind = True
                continue
            self._descriptors.append(descriptor)
            self._loop.add_reader(descriptor, self._ended, descriptor)
        if blind:
            self._ask()

    def ended(self) -> str | None:
        """What became of the first that ended, in words; None while all run."""
        for process in self._processes:
            code = process.poll()
            if code is not None:
                return f"the engine (pid {process.pid}) {in_words(code)}"
        return None

    def codes(self) -> list[int | None]:
        """Exit codes; None for those that run."""
        return [process.poll() for process in self._processes]

    def signal(self, number: signal.Signals) -> None:
        """Send it to those that run. They are ours and not asked for yet, so no number is stale."""
        for process in self._processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(process.pid, number)

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        for descriptor in self._descriptors:
            self._forget(descriptor)
        self._descriptors.clear()

    def _ended(self, descriptor: int) -> None:
        # It stays readable for ever.
        self._descriptors.remove(descriptor)
        self._forget(descriptor)
        self._wake()

    def _forget(self, descriptor: int) -> None:
        self._loop.remove_reader(descriptor)
        os.close(descriptor)

    def _ask(self) -> None:
        if self.ended() is not None:
            self._wake()
        self._timer = self._loop.call_later(LOOK_SECONDS, self._ask)
