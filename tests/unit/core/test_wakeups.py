"""gRPC's wake-ups of the loop: taken at once, with none lost, on both loops we run on."""

from __future__ import annotations

import asyncio
import fcntl
import socket
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import pytest
import uvloop

from smg_grpc_servicer.core import wakeups

LOOPS = {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}
STREAMS, MESSAGES = 64, 40


def run(make: Callable[[], asyncio.AbstractEventLoop], main: Callable[[], Any]) -> None:
    loop = make()
    try:
        loop.run_until_complete(asyncio.wait_for(main(), 30))
    finally:
        loop.close()


async def echo(request: bytes, context: Any) -> AsyncIterator[bytes]:
    for at in range(MESSAGES):
        yield request + bytes([at])


async def _stream(channel: grpc.aio.Channel, name: bytes) -> list[bytes]:
    open_stream: Any = channel.unary_stream("/t.T/Echo")
    call = open_stream(name)
    return [message async for message in call]


@pytest.mark.parametrize("loop", LOOPS)
def test_all_that_is_there_is_taken_in_one_turn(loop: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With many streams there is more than one byte in most turns, and every message arrives."""
    taken: list[int] = []
    plain = fcntl.ioctl

    def counted(fd: Any, request: int, argument: Any) -> Any:
        answer = plain(fd, request, argument)
        taken.append(argument[0])
        return answer

    monkeypatch.setattr(fcntl, "ioctl", counted)

    async def main() -> None:
        wakeups.gather(asyncio.get_running_loop())
        wakeups.gather(asyncio.get_running_loop())
        server = grpc.aio.server()
        handler: Any = grpc.unary_stream_rpc_method_handler(echo)
        service = grpc.method_handlers_generic_handler("t.T", {"Echo": handler})
        server.add_generic_rpc_handlers((service,))
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            names = [b"%d-" % at for at in range(STREAMS)]
            got = await asyncio.gather(*(_stream(channel, name) for name in names))
        assert got == [[name + bytes([at]) for at in range(MESSAGES)] for name in names]
        await server.stop(0)

    run(LOOPS[loop], main)
    assert sum(taken) > STREAMS * MESSAGES, "grpcio no longer wakes the loop as it did"
    assert len(taken) < 0.8 * sum(taken)


@pytest.mark.parametrize("loop", LOOPS)
def test_other_readers_are_left_alone(loop: str) -> None:
    async def main() -> None:
        running = asyncio.get_running_loop()
        wakeups.gather(running)
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)
            read: asyncio.Queue[bytes] = asyncio.Queue()
            running.add_reader(here, partial(lambda: read.put_nowait(here.recv(1))))
            there.send(b"ab")
            assert [await read.get(), await read.get()] == [b"a", b"b"]
            running.remove_reader(here)

    run(LOOPS[loop], main)
