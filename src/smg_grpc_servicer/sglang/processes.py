"""SGLang's rank processes: started by SGLang's own launcher code, watched, ended.

`Engine._launch_subprocesses` checks the arguments, publishes the configuration, allots the ports
and starts the ranks, as every other entry of SGLang's has it done. Where it would start its
detokenizer and its tokenizer manager, we put nothing and our sockets. It runs on a thread that
lives as long as the ranks do: Linux kills them when the *thread* that started them ends. The same
thread waits for their end, so it is told within milliseconds.
"""

from __future__ import annotations

import asyncio
import logging
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import wait
from pathlib import Path
from time import monotonic
from typing import Any

from smg_grpc_servicer.core.children import end_descriptor, in_words
from smg_grpc_servicer.sglang import facts

log = logging.getLogger(__name__)

RELEASE_SECONDS = 10.0
"""How long ranks that were asked to end may take to release what they hold."""
TERMINATE_SECONDS = 2.0
KILL_SECONDS = 3.0
LAUNCH_SECONDS = 2.0
"""How long a stop waits for a launch that is under way."""

_NOISE = "Signal handler is not added because"


class RanksFailed(Exception):
    """The ranks did not come up; the message is one line for the operator."""


@dataclass(slots=True)
class Launched:
    """Ranks that are ready."""

    port_args: Any
    front: Any
    """What `front` made while the ranks were loading."""
    infos: Sequence[dict[str, Any]]
    """The ready reports, rank 0's first."""


@dataclass(slots=True)
class _Front:
    """In the place of SGLang's tokenizer manager: takes what its launcher has to say to one."""

    max_req_input_len: int | None = None
    startup_time: dict[str, Any] = field(default_factory=dict)

    def set_startup_time(self, startup_time: dict[str, Any]) -> None:
        self.startup_time = startup_time


class Ranks:
    """The processes of one server.

    :param front: called with (server_args, port_args) once the ranks are started and load; on our
        thread. What it makes comes back in `Launched`.
    :param on_exit: called on the loop when a process ends that was not asked to; once.
    """

    def __init__(
        self,
        server_args: Any,
        front: Callable[[Any, Any], Any],
        on_exit: Callable[[str], None],
    ) -> None:
        self._server_args = server_args
        self._make_front = front
        self._on_exit = on_exit
        self._processes: list[Any] = []
        """Our children; the first is the data-parallel controller, if there are several ranks."""
        self._others: dict[int, int] = {}
        """The controller's children, pid by a descriptor that tells their end."""
        self._daemons: list[Any] = []
        self.front: Any = None
        """What `front` made, once it has."""
        self._ready: Future[Launched] = Future()
        self._asked = threading.Event()
        self._spawning = threading.Lock()
        """Held while SGLang starts processes: who ends them has to know them all."""
        self._launched = threading.Event()
        """The launch is over, whatever became of it."""
        self._listener, self._wake = multiprocessing.Pipe(duplex=False)
        self._thread: threading.Thread | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._port_args: Any = None
        self._failure: str | None = None
        self._controlled = False

    async def start(self) -> Launched:
        """Start and wait until all are ready.

        :raises RanksFailed: they will not be.
        """
        self._loop = asyncio.get_running_loop()
        self._ready.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, name="sglang-ranks", daemon=True)
        self._thread.start()
        return await asyncio.wrap_future(self._ready)

    def failed(self, reason: str) -> None:
        """A rank says so, by signal: a start is over, a running server is told."""
        if not self._settle(RanksFailed(reason)):
            self._report(reason)

    async def close(self, ask: Callable[[], None] | None = None) -> None:
        """End them: asked by `ask` if there is one, then terminated, then killed."""
        self._asked.set()
        self._wake.send_bytes(b"")
        asked = ask is not None and all(process.is_alive() for process in self._processes)
        if ask is not None and asked:
            try:
                ask()
            except Exception as error:
                log.warning("the ranks could not be asked to end: %s", error)
                asked = False
        await asyncio.to_thread(self._end, RELEASE_SECONDS if asked else 0.0)
        _unlink(self._port_args)

    def kill(self) -> None:
        """At once; their own children go with them."""
        self._asked.set()
        for child in multiprocessing.active_children():
            child.kill()
        _unlink(self._port_args)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    # On the thread.

    def _run(self) -> None:
        # A Ctrl-C goes to the whole process group; ours is the one to hear it. Children inherit it.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            launched = self._launch()
        except SystemExit as error:
            self._settle(RanksFailed(f"SGLang's launcher asked to exit with {error.code!r}"))
        except Exception as error:
            self._settle(error if self._failure is None else RanksFailed(self._failure))
        else:
            self._launched.set()
            self._settle(launched)
            self._watch()
        self._launched.set()
        # Still the parent of what is left, until somebody has ended it.
        self._asked.wait()
        _gone([process.sentinel for process in self._processes], None)

    def _launch(self) -> Launched:
        from sglang.srt.arg_groups.model_override_base import resolving_view
        from sglang.srt.entrypoints import engine

        ranks = self

        class Launcher(engine.Engine):  # type: ignore[misc, name-defined, unused-ignore]
            @classmethod
            def _launch_scheduler_processes(
                cls, server_args: Any, port_args: Any, *args: Any, **options: Any
            ) -> Any:
                ranks._port_args = port_args
                with ranks._spawning:
                    ranks._go_on()
                    before = set(multiprocessing.active_children())
                    try:
                        made = super()._launch_scheduler_processes(
                            server_args, port_args, *args, **options
                        )
                    except BaseException:
                        ranks._processes = list(set(multiprocessing.active_children()) - before)
                        raise
                    ranks._processes = list(made[1])
                return made

            @classmethod
            def _launch_detokenizer_subprocesses(cls, *args: Any, **options: Any) -> Any:
                return [], []

        quiet = logging.getLogger(engine.__name__)
        quiet.addFilter(_no_noise)
        try:
            made = Launcher._launch_subprocesses(  # noqa: SLF001 - SGLang has no public one
                server_args=self._server_args,
                init_tokenizer_manager_func=self._init_front,
                run_scheduler_process_func=_rank_main(),
                run_detokenizer_process_func=None,
            )
        except RuntimeError as error:
            died = self._died()
            raise RanksFailed(str(error) if died is None else died) from error
        finally:
            quiet.removeFilter(_no_noise)
        _, _, port_args, launched, watchdog, *more = made
        if watchdog is not None:
            watchdog.stop()  # it would send us SIGQUIT; we watch ourselves
        self._daemons = list(more[0] or ()) if more else []
        ours = set(self.pids)
        self._controlled = facts.num_ranks(resolving_view(self._server_args)) > 1
        self._others = _opened(pid for pid in launched.all_child_pids if pid not in ours)
        return Launched(port_args, self.front, list(launched.scheduler_infos))

    def _go_on(self) -> None:
        """:raises RanksFailed: nobody waits for the launch any more."""
        if self._asked.is_set():
            raise RanksFailed("the server has stopped")

    def _init_front(self, server_args: Any, port_args: Any) -> tuple[_Front, None]:
        self._go_on()
        self.front = self._make_front(server_args, port_args)
        return _Front(), None

    def _watch(self) -> None:
        """Until one ends or all are asked to."""
        sentinels = {process.sentinel: at for at, process in enumerate(self._processes)}
        ready = wait([*sentinels, *self._others, self._listener])
        if self._asked.is_set():
            return
        for each in ready:
            if each in sentinels:
                at = sentinels[each]
                self._processes[at].join(KILL_SECONDS)  # it is as good as gone; for its exit code
                self._report(ended(at, self._processes[at]))
            elif each in self._others:
                # Not our child: its exit code is its parent's to know.
                self._report(f"scheduler process of pid {self._others[each]} ended")

    def _end(self, patience: float) -> None:
        """Wait for those who were asked, then see to it that all are gone."""
        with self._spawning:
            processes = [*self._processes, *self._daemons]
        # The controller stays until it is told otherwise; its ranks are no children of ours.
        _join(self._processes[1:] if self._controlled else self._processes, patience)
        _gone(self._others, patience)
        for each in processes:
            if each.is_alive():
                each.terminate()
        _join(processes, TERMINATE_SECONDS)
        left = [each for each in processes if each.is_alive()]
        if left:
            log.warning("%d processes of SGLang did not end and are killed", len(left))
        for each in left:
            each.kill()
        _join(left, KILL_SECONDS)
        _gone(self._others, KILL_SECONDS)
        for descriptor in self._others:
            os.close(descriptor)
        self._others = {}
        # A launch that goes on without its processes fails soon; what it makes until then is known
        # afterwards.
        self._launched.wait(LAUNCH_SECONDS)

    # Between.

    def _died(self) -> str | None:
        for at, process in enumerate(self._processes):
            if process.exitcode is not None:
                return ended(at, process)
        return None

    def _settle(self, outcome: Launched | Exception) -> bool:
        """The start's outcome, unless there is one already."""
        if self._ready.done():
            return False
        with suppress(asyncio.InvalidStateError):
            if isinstance(outcome, Exception):
                self._ready.set_exception(outcome)
            else:
                self._ready.set_result(outcome)
            return True
        return False

    def _report(self, reason: str) -> None:
        """From any thread; the first reason counts."""
        if self._failure is not None or self._asked.is_set() or self._loop is None:
            return
        self._failure = reason
        with suppress(RuntimeError):  # the loop has ended meanwhile
            self._loop.call_soon_threadsafe(self._on_exit, reason)


def ended(at: int, process: Any) -> str:
    """How a rank process ended, in words."""
    return f"scheduler process {at} (pid {process.pid}) {in_words(process.exitcode)}"


def _rank_main() -> Callable[..., None]:
    """SGLang's own; spawned processes import it by its name."""
    from sglang.srt.managers.scheduler import run_scheduler_process

    main: Callable[..., None] = run_scheduler_process
    return main


def _no_noise(record: logging.LogRecord) -> bool:
    """Without SGLang's warning that it has no SIGQUIT handler off the main thread: we have one."""
    return not str(record.msg).startswith(_NOISE)


def _join(processes: Sequence[Any], seconds: float) -> None:
    """Wait for children of ours, and reap them."""
    end = monotonic() + seconds
    for process in processes:
        process.join(max(0.0, end - monotonic()))


def _gone(waited: Iterable[Any], seconds: float | None) -> None:
    """Wait until all descriptors are ready, which means that what they stand for has ended."""
    left = set(waited)
    end = None if seconds is None else monotonic() + seconds
    while left:
        remaining = None if end is None else end - monotonic()
        if remaining is not None and remaining <= 0:
            return
        left -= set(wait(left, remaining))


def _opened(pids: Iterable[int]) -> dict[int, int]:
    """Descriptors that tell when those processes end; none where the system has no such thing."""
    made = ((end_descriptor(pid), pid) for pid in pids)
    return {descriptor: pid for descriptor, pid in made if descriptor is not None}


def _unlink(port_args: Any) -> None:
    """Remove the files of the ipc sockets and of the load reports, which nobody else does."""
    if port_args is None:
        return
    from sglang.srt.managers import load_snapshot

    values = (value for value in vars(port_args).values() if isinstance(value, str))
    files = [value[6:] for value in values if value.startswith("ipc://")]
    for file in (*files, load_snapshot.shm_path_for(port_args.instance_id)):
        with suppress(OSError):
            Path(file).unlink()


def follow(server_args: Any) -> None:
    """Run the ranks of a node that is not the first, to their end: SGLang's own code alone."""
    from sglang.srt.entrypoints import engine

    engine.Engine._launch_subprocesses(  # noqa: SLF001 - see above
        server_args=server_args,
        init_tokenizer_manager_func=None,
        run_scheduler_process_func=_rank_main(),
        run_detokenizer_process_func=None,
    )


__all__ = ["Launched", "Ranks", "RanksFailed", "ended", "follow"]
