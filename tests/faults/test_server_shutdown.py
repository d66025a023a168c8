"""How a server ends: by signal, by engine death, by a fault at the start; each in a process."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
from time import monotonic

import grpc
import pytest

from tests.support.child import Child, running
from tests.support.dial import NOT_SERVING, SERVING, check, watch
from tests.support.slow_service import NAME, echo, hold

SHUTDOWNS = int(os.environ.get("SMG_TEST_SHUTDOWNS", "20"))


async def exit_code(child: Child, seconds: float = 20.0) -> int:
    return await asyncio.to_thread(child.exit_code, seconds)


async def printed(child: Child, pattern: str) -> None:
    await asyncio.to_thread(child.wait_for, pattern)


async def test_sigterm_lets_the_stream_finish() -> None:
    """B1: SIGTERM turns readiness, refuses new work, lets the stream end OK, then exits 0."""
    with running("--drain-seconds", "10") as child:
        address = await asyncio.to_thread(child.address)
        await printed(child, "state: serving")
        async with grpc.aio.insecure_channel(address) as channel:
            stream = hold(channel, 1.5)
            assert await stream.read() == b"started"
            child.signal(signal.SIGTERM)
            await printed(child, "state: draining")
            assert await check(channel, NAME) == NOT_SERVING
            assert await check(channel, "") == SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="draining") as refused:
                await echo(channel)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            assert await stream.read() == b"done"
            assert await stream.code() is grpc.StatusCode.OK
        assert await exit_code(child) == 0
        order = [
            child.output.index(text) for text in ("state: draining", "state: stopped", "closed")
        ]
        assert order == sorted(order)


async def test_the_drain_has_a_bound() -> None:
    """V14: at the bound what still runs is cut with UNAVAILABLE and the process is gone."""
    with running("--drain-seconds", "0.5") as child:
        address = await asyncio.to_thread(child.address)
        await printed(child, "state: serving")
        async with grpc.aio.insecure_channel(address) as channel:
            stream = hold(channel, 600)
            assert await stream.read() == b"started"
            start = monotonic()
            child.signal(signal.SIGINT)
            with pytest.raises(grpc.aio.AioRpcError, match="stopping") as cut:
                await stream.read()
            assert cut.value.code() is grpc.StatusCode.UNAVAILABLE
            assert monotonic() - start >= 0.4
        assert await exit_code(child, 5) == 0
        assert "the drain is over, 1 unfinished" in child.output


async def test_an_idle_server_stops_at_once() -> None:
    """V14: nothing in flight, nothing to wait for, however long the drain may be."""
    with running("--drain-seconds", "600") as child:
        address = await asyncio.to_thread(child.address)
        await printed(child, "state: serving")
        async with grpc.aio.insecure_channel(address) as channel:
            answers = watch(channel, NAME)
            assert (await answers.read()).status == SERVING
            start = monotonic()
            child.signal(signal.SIGTERM)
            assert (await answers.read()).status == NOT_SERVING
            assert await exit_code(child) == 0
            assert monotonic() - start < 3


@pytest.mark.parametrize("event_loop", ["asyncio", "auto"])
async def test_a_second_signal_ends_at_once(event_loop: str) -> None:
    """V14: the second SIGTERM does not wait for the drain; children are ended first."""
    with running("--drain-seconds", "600", "--event-loop", event_loop) as child:
        address = await asyncio.to_thread(child.address)
        await printed(child, "state: serving")
        async with grpc.aio.insecure_channel(address) as channel:
            stream = hold(channel, 600)
            assert await stream.read() == b"started"
            child.signal(signal.SIGTERM)
            await printed(child, "state: draining")
            child.signal(signal.SIGTERM)
            assert await exit_code(child, 3) == 128 + signal.SIGTERM
            await printed(child, "killed")


@pytest.mark.parametrize("event_loop", ["asyncio", "auto"])
async def test_a_second_signal_does_not_need_the_loop(event_loop: str) -> None:
    """V14: the second signal ends the process also while something blocks the event loop."""
    with running("--fault", "loop-blocks", "--event-loop", event_loop) as child:
        address = await asyncio.to_thread(child.address)
        await printed(child, "state: serving")
        async with grpc.aio.insecure_channel(address) as channel:
            stream = hold(channel, 600)
            assert await stream.read() == b"started"
            child.signal(signal.SIGTERM)
            await printed(child, "blocking")
            child.signal(signal.SIGINT)
            assert await exit_code(child, 3) == 128 + signal.SIGINT


@pytest.mark.parametrize("fault", ["close-hangs", "thread-hangs"])
async def test_the_exit_guard_ends_a_hanging_shutdown(fault: str) -> None:
    """U1: the drain is over but something hangs: stacks are dumped and the process ends."""
    with running("--fault", fault, "--guard", "0.5") as child:
        await printed(child, "state: serving")
        child.signal(signal.SIGTERM)
        assert await exit_code(child, 5) == 1
        assert "did not end within 0.5 s" in child.output
        assert "most recent call first" in child.output
        assert "killed" in child.output


async def test_engine_death_ends_the_process() -> None:
    """O2: a dead engine turns both health names, open streams may end, then exit code 1."""
    with running("--fault", "die", "--exit-on-engine-death-seconds", "10") as child:
        address = await asyncio.to_thread(child.address)
        await printed(child, "state: serving")
        async with grpc.aio.insecure_channel(address) as channel:
            stream = hold(channel, 1.5)
            assert await stream.read() == b"started"
            await printed(child, "engine dead: it broke")
            assert await check(channel, NAME) == NOT_SERVING
            assert await check(channel, "") == NOT_SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="it broke"):
                await echo(channel)
            assert await stream.read() == b"done"
        assert await exit_code(child) == 1


async def test_engine_death_can_leave_the_process_up() -> None:
    """O2: with 0 the process stays, not alive, until it is told to stop; its code is still 1."""
    with running("--fault", "die", "--exit-on-engine-death-seconds", "0") as child:
        address = await asyncio.to_thread(child.address)
        await printed(child, "engine dead")
        async with grpc.aio.insecure_channel(address) as channel:
            assert await check(channel, "") == NOT_SERVING
        assert child.process.poll() is None
        child.signal(signal.SIGTERM)
        assert await exit_code(child) == 1


@pytest.mark.parametrize(
    ("fault", "code", "text"),
    [
        ("load", 1, "no such weights"),
        ("load-config", 2, "error: --model: got 'x'; allowed: a model"),
        ("die-warm", 1, "engine dead: it broke"),
    ],
)
async def test_a_failed_start_has_its_exit_code(fault: str, code: int, text: str) -> None:
    """A setting that cannot work exits 2, anything else 1; the engine is closed either way."""
    with running("--fault", fault, "--load-seconds", "0.5") as child:
        assert await exit_code(child) == code
        await printed(child, "closed")
        assert text in child.output


async def test_health_answers_while_loading() -> None:
    """G6: during the load the port answers, not ready but alive."""
    with running("--load-seconds", "600") as child:
        address = await asyncio.to_thread(child.address)
        async with grpc.aio.insecure_channel(address) as channel:
            assert await check(channel, NAME) == NOT_SERVING
            assert await check(channel, "") == SERVING
            with pytest.raises(grpc.aio.AioRpcError, match="the server is loading"):
                await echo(channel)
        child.signal(signal.SIGTERM)
        assert await exit_code(child) == 0


async def test_a_port_in_use_is_said_and_exits_2() -> None:
    """U5: the second server on a port does not start, and says why."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with running("--port", str(port)) as child:
            assert await exit_code(child) == 2
            assert f"error: --port: port {port} is in use on 127.0.0.1" in child.output


async def test_every_bad_setting_is_named_at_once() -> None:
    """A command line is mended once: all faults are listed, exit code 2."""
    with running("--drain-seconds", "-1", "--max-message-bytes", "lots") as child:
        assert await exit_code(child) == 2
        assert "error: --drain-seconds: got '-1'; allowed: seconds, 0 or more" in child.output
        assert "error: --max-message-bytes: got 'lots'" in child.output


@pytest.mark.parametrize("seed", range(SHUTDOWNS))
async def test_sigterm_at_any_moment(seed: int) -> None:
    """U1, B1: whenever SIGTERM comes the process ends in time, code 0, and no status is UNKNOWN."""
    dice = random.Random(seed)
    with running("--drain-seconds", "0.3", "--load-seconds", str(dice.choice([0, 0.1]))) as child:
        address = await asyncio.to_thread(child.address)
        async with grpc.aio.insecure_channel(address) as channel:
            calls = [
                asyncio.ensure_future(_outcome(channel, dice.choice([0.05, 600])))
                for _ in range(10)
            ]
            await asyncio.wait(calls, timeout=dice.uniform(0, 0.4))
            child.signal(dice.choice([signal.SIGTERM, signal.SIGINT]))
            codes = await asyncio.gather(*calls)
            assert set(codes) <= {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE}
            assert await exit_code(child, 5) == 0


async def _outcome(channel: grpc.aio.Channel, seconds: float) -> grpc.StatusCode:
    call = hold(channel, seconds)
    try:
        while await call.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return error.code()
    return await call.code()
