"""The ZMQ sockets between this process and SGLang's ranks: one out, one or two in.

Plain sockets whose file descriptors the event loop watches: a wake-up takes all that has arrived,
and no task or future is made per message. What travels is encoded by SGLang's own `sock_send` and
`sock_recv`, so both of its encodings (`SGLANG_USE_PICKLE_IPC`) work. Nothing here blocks.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import zmq

from smg_grpc_servicer.core.errors import Unavailable

log = logging.getLogger(__name__)

MAX_BURST = 64
"""Messages taken in one go; then the loop's other work has its turn."""

_Deliver = Callable[[Any], None]
_Broken = Callable[[Exception], None]


class Sockets:
    """Bound before the ranks start, because they connect. All methods on the event loop."""

    def __init__(
        self,
        context: Any,
        out: Any,
        inbound: tuple[Any, ...],
        *,
        send: Callable[..., None],
        receive: Callable[..., Any],
    ) -> None:
        self._context = context
        self._out = out
        self._inbound = inbound
        self._encode_and_send = send
        self._receive = receive
        self._loop: asyncio.AbstractEventLoop | None = None
        self._watched: dict[Any, int] = {}
        self._deliver: _Deliver = lambda message: None
        self._broken: _Broken = lambda error: None
        self.closed = False

    @classmethod
    def bind(cls, port_args: Any, skip_tokenizer_init: bool) -> Sockets:
        """The sockets of `port_args`; without a tokenizer everything comes on one of them."""
        from sglang.srt.managers import io_struct
        from sglang.srt.utils.network import get_zmq_socket

        context = zmq.Context(1)
        opened: list[Any] = []
        try:
            opened.append(
                get_zmq_socket(context, zmq.PUSH, port_args.scheduler_input_ipc_name, True)
            )
            opened.append(get_zmq_socket(context, zmq.PULL, port_args.tokenizer_ipc_name, True))
            if not skip_tokenizer_init:
                opened.append(
                    get_zmq_socket(context, zmq.PULL, port_args.detokenizer_ipc_name, True)
                )
        except BaseException:
            context.destroy(linger=0)
            raise
        return cls(
            context,
            opened[0],
            tuple(opened[1:]),
            send=io_struct.sock_send,
            receive=io_struct.sock_recv,
        )

    def start(self, deliver: _Deliver, broken: _Broken) -> None:
        """Call `deliver` with every message; `broken` once, when receiving cannot go on."""
        self._loop = asyncio.get_running_loop()
        self._deliver, self._broken = deliver, broken
        for socket in self._inbound:
            fd = socket.getsockopt(zmq.FD)
            self._watched[socket] = fd
            self._loop.add_reader(fd, self._drain, socket)
            # The descriptor tells edges only: what came before it was watched must be asked for.
            self._loop.call_soon(self._drain, socket)

    def send(self, message: Any) -> None:
        """:raises Unavailable: no rank is connected (any more)."""
        try:
            self._encode_and_send(self._out, message, flags=zmq.NOBLOCK)
        except zmq.ZMQError as error:
            raise Unavailable(f"the scheduler takes no requests: {error}") from error

    def _drain(self, socket: Any) -> None:
        loop, receive, deliver = self._loop, self._receive, self._deliver
        assert loop is not None
        for _ in range(MAX_BURST):
            if socket not in self._watched:
                return
            try:
                # Asking costs less than the exception that says there is nothing.
                if not socket.getsockopt(zmq.EVENTS) & zmq.POLLIN:
                    return
                deliver(receive(socket, zmq.NOBLOCK))
            except zmq.Again:
                return
            except Exception as error:
                # Whose message it was is not known: somebody would wait for ever.
                if not isinstance(error, zmq.ZMQError):
                    log.exception("a message of the scheduler was not understood")
                self._fail(error)
                return
        loop.call_soon(self._drain, socket)

    def _fail(self, error: Exception) -> None:
        self._unwatch()
        self._broken(error)

    def _unwatch(self) -> None:
        for fd in self._watched.values():
            assert self._loop is not None
            self._loop.remove_reader(fd)
        self._watched.clear()

    async def close(self) -> None:
        """Everything unsent is dropped. The context ends on a thread: its end may block."""
        if self.closed:
            return
        self.closed = True
        self._unwatch()
        for socket in (self._out, *self._inbound):
            socket.close(linger=0)
        await asyncio.to_thread(self._context.destroy, linger=0)

    def statistics(self) -> dict[str, int]:
        return {"watched": len(self._watched)}
