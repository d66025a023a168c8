"""A server of grpc.aio that costs the event loop less, for each message and each request.

A thread of grpc.aio puts each completed operation (a message that is sent, a request that came) in
a queue and writes one byte to a socket that the loop watches. That costs the loop twice.

- A turn of the loop reads one byte and empties the queue; a byte that is left wakes it again, for
  nothing, and with many streams nearly all turns are such ones. Here the bytes that are there are
  read at once. Source: `PollerCompletionQueue` in grpcio's `completion_queue.pyx.pxi`.
- The thread is woken by every message and takes the processor from the loop for it, when no other
  is idle. Under `SCHED_BATCH` it does not: it runs when the loop waits, or elsewhere. Source:
  sched(7).

Together they take a third off what a message costs (`benchmarks/vllm_servicer.py`).

Generated code adds a service twice, by a handler and by its methods one by one. Calls of a method
that was added by itself have a queue of their own, but `grpc.aio` then waits on each of these
queues anew after every request, a tenth of what a short one costs. So only those methods get one
that must not stand behind a burst of requests (`PROMPT`); older grpcio has one queue for
all. Source: `_server_main_loop` in grpcio's `server.pyx.pxi`.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import sys
import termios
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import grpc

from smg_grpc_servicer.core.handlers import Handler, Handlers, as_ours

PROMPT = frozenset({"Check", "HealthCheck", "Abort", "GetLoads"})
"""Methods that a burst of requests must not hold up: what a gateway gives up on soon, and what ends
requests."""


def server(**options: Any) -> grpc.aio.Server:
    """`grpc.aio.server` for the running loop; to be the first thing of grpc.aio that is made there.

    What was made before keeps its threads, and where grpcio looks different inside, it is left
    alone.
    """
    _gather(asyncio.get_running_loop())
    with _yielding_threads():
        made: Any = grpc.aio.server(**options)
    generic, registered = made.add_generic_rpc_handlers, made.add_registered_method_handlers

    def add_generic(given: Iterable[grpc.GenericRpcHandler]) -> None:
        generic(tuple(map(Handlers, given)))

    def add_registered(service: str, given: Mapping[str, Handler]) -> None:
        registered(service, {name: as_ours(given[name]) for name in PROMPT & given.keys()})

    made.add_generic_rpc_handlers = add_generic
    made.add_registered_method_handlers = add_registered
    cheaper: grpc.aio.Server = made
    return cheaper


@contextmanager
def _yielding_threads() -> Iterator[None]:
    """Threads that begin here, and theirs, let others go first; a policy somebody chose stays."""
    if sys.platform != "linux" or os.sched_getscheduler(0) != os.SCHED_OTHER:
        yield
        return
    plain = os.sched_param(0)
    with suppress(OSError):  # a sandbox may forbid it
        os.sched_setscheduler(0, os.SCHED_BATCH, plain)
    try:
        yield
    finally:
        with suppress(OSError):
            os.sched_setscheduler(0, os.SCHED_OTHER, plain)


def _gather(loop: asyncio.AbstractEventLoop) -> None:
    plain = loop.add_reader
    if hasattr(plain, "gathers"):
        return

    def add_reader(fd: Any, callback: Callable[..., Any], *args: Any) -> Any:
        if isinstance(fd, socket.socket) and _is_of_grpc(callback):
            callback = _at_once(fd, callback)
        return plain(fd, callback, *args)

    add_reader.gathers = True  # type: ignore[attr-defined]
    loop.add_reader = add_reader  # type: ignore[assignment, method-assign]


def _is_of_grpc(callback: Callable[..., Any]) -> bool:
    if not isinstance(callback, partial):
        return False
    owner = getattr(callback.func, "__self__", None)
    return type(owner).__name__ == "PollerCompletionQueue"


def _at_once(wakeups: socket.socket, handle: Callable[[], Any]) -> Callable[[], None]:
    waiting = array("i", [0])

    def woken() -> None:
        # What a byte stands for was in the queue before it, and `handle` empties the queue.
        fcntl.ioctl(wakeups, termios.FIONREAD, waiting)
        if waiting[0] > 1:
            wakeups.recv(waiting[0] - 1)
        handle()

    return woken
