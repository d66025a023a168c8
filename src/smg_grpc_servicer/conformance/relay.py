"""A TCP relay in front of the server: the only way to cut a connection without a goodbye."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager


class Relay:
    """Passes bytes on until `cut`."""

    def __init__(self, host: str, port: int) -> None:
        self.address = ""
        self._host, self._port = host, port
        self._transports: list[asyncio.WriteTransport] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def cut(self) -> None:
        """Reset every connection, both sides, now."""
        for transport in self._transports:
            transport.abort()
        self._transports.clear()

    async def accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, self._port)
        self._transports += [writer.transport, far_writer.transport]
        for source, sink in ((reader, far_writer), (far_reader, writer)):
            task = asyncio.ensure_future(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def close(self) -> None:
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        try:
            while data := await source.read(65536):
                sink.write(data)
                await sink.drain()
        except OSError:
            return  # The other side was cut.
        finally:
            sink.close()


@asynccontextmanager
async def relay(target: str) -> AsyncIterator[Relay]:
    """A relay to `host:port` on a free port of this machine."""
    host, _, port = target.rpartition(":")
    between = Relay(host.strip("[]"), int(port))
    server = await asyncio.start_server(between.accept, "127.0.0.1", 0)
    address = server.sockets[0].getsockname()
    between.address = f"{address[0]}:{address[1]}"
    try:
        yield between
    finally:
        server.close()
        await between.close()
