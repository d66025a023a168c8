"""gRPC's wake-ups of the loop: taken at once, with none lost, on both loops we run on."""

from __future__ import annotations

import asyncio
import fcntl
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import grpc
import pytest
import uvloop

from smg_grpc_servicer.core import wakeups
from tests.support.grpc_queues import ONE_FOR_ALL

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
        await wakeups.server().stop(0)
        server = wakeups.server()
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


def test_requests_wait_in_few_queues() -> None:
    """Not in one for each method of each service; all are answered, and health has its own."""
    pending: list[int] = []
    plain = asyncio.wait

    async def counted(futures: Any, **options: Any) -> Any:
        pending.append(len(futures))
        return await plain(futures, **options)

    async def main() -> None:
        server = wakeups.server()
        names = ("Generate", "Embed", "GetModelInfo", "Check", "Abort")
        handlers: dict[str, Any] = {
            name: grpc.unary_stream_rpc_method_handler(echo) for name in names
        }
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
        server.add_registered_method_handlers("t.T", handlers)
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            for name in handlers:
                call: Any = channel.unary_stream(f"/t.T/{name}")
                assert len([message async for message in call(b"x")]) == MESSAGES
        await server.stop(0)

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(asyncio, "wait", counted)
        run(LOOPS["asyncio"], main)
    assert set(pending) == (set() if ONE_FOR_ALL else {3})


@pytest.mark.parametrize("loop", LOOPS)
def test_other_readers_are_left_alone(loop: str) -> None:
    async def main() -> None:
        running = asyncio.get_running_loop()
        await wakeups.server().stop(0)
        here, there = socket.socketpair()
        with here, there:
            here.setblocking(False)
            read: asyncio.Queue[bytes] = asyncio.Queue()
            running.add_reader(here, partial(lambda: read.put_nowait(here.recv(1))))
            there.send(b"ab")
            assert [await read.get(), await read.get()] == [b"a", b"b"]
            running.remove_reader(here)

    run(LOOPS[loop], main)


THREADS = """
import asyncio, os, threading, grpc
{first}
from smg_grpc_servicer.core import wakeups

async def main():
    server = wakeups.server()
    server.add_insecure_port("127.0.0.1:0")
    await server.start()
    (poller,) = [t for t in threading.enumerate() if "poll" in t.name]
    mine = os.sched_getscheduler(0)
    plain = await asyncio.to_thread(os.sched_getscheduler, 0)
    print(mine, os.sched_getscheduler(poller.native_id), plain)
    await server.stop(0)

asyncio.run(main())
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the policy is Linux's")
@pytest.mark.parametrize(
    ("first", "expected"),
    [
        ("", [os.SCHED_OTHER, os.SCHED_BATCH, os.SCHED_OTHER]),
        (
            "os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))",
            [os.SCHED_IDLE, os.SCHED_IDLE, os.SCHED_IDLE],
        ),
    ],
    ids=["ours", "the operator's"],
)
def test_threads_of_grpc_let_the_loop_go_first(first: str, expected: list[int]) -> None:
    """And no other thread does; a policy that was chosen for the process stays."""
    script = THREADS.format(first=first)
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=30
    )
    assert [int(word) for word in done.stdout.split()] == expected


def test_a_sandbox_that_forbids_it_gets_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(*args: Any) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "sched_setscheduler", forbidden, raising=False)

    async def main() -> None:
        await wakeups.server().stop(0)

    run(LOOPS["asyncio"], main)
