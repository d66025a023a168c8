"""A server of ours as a process of its own, with faults to choose: for tests of how it ends.

Run as `python -m tests.support.server_child`; flags are the standard ones and those below.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace

from smg_grpc_servicer.core import logs, parsers
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import (
    EVENT_LOOP,
    LOG_FORMAT,
    STALL,
    ServerOptions,
    server_settings,
)
from smg_grpc_servicer.core.process import print_config_error, run
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.core.settings import Setting, Settings
from tests.support.slow_service import SlowService

LOAD_SECONDS = Setting("load_seconds", parsers.SECONDS, 0.0, "loading takes", "--load-seconds")
FAULT = Setting(
    "fault",
    parsers.one_of(
        "none",
        "load",
        "load-config",
        "die",
        "die-warm",
        "close-hangs",
        "thread-hangs",
        "loop-blocks",
    ),
    "none",
    "what goes wrong",
    "--fault",
)
GUARD = Setting("guard", parsers.SECONDS, 8.0, "exit guard", "--guard")


def fail(error: Exception) -> Callable[[], object]:
    def act() -> object:
        raise error

    return act


def block() -> None:
    print("blocking", flush=True)
    time.sleep(30)


def kill() -> None:
    print("killed", flush=True)


def main() -> int:
    settings = server_settings("test") + Settings(LOAD_SECONDS, FAULT, GUARD)
    parser = argparse.ArgumentParser()
    settings.add_to(parser)
    try:
        values = settings.resolve(parser.parse_args())
        options = replace(
            ServerOptions.from_values(values), exit_guard_seconds=values.get_value(GUARD)
        )
    except ConfigError as error:
        print_config_error(error)
        return 2
    logs.configure("info", values.get_value(LOG_FORMAT))
    fault = values.get_value(FAULT)

    async def serve() -> int:
        board = StatusBoard(stall_seconds=values.get_value(STALL))
        server = GrpcServer(options, board)
        service = SlowService(board)
        service.add_to(server)
        loop = asyncio.get_running_loop()

        after_load: dict[str, Callable[[], object]] = {
            "load": fail(RuntimeError("no such weights")),
            "load-config": fail(ConfigError("--model: got 'x'; allowed: a model")),
            "die": lambda: loop.call_later(0.3, board.dead, "it broke"),
            "loop-blocks": lambda: loop.call_later(0.5, block),
        }

        async def start() -> None:
            if fault == "die-warm":
                loop.call_later(0.1, board.dead, "it broke")
            await asyncio.sleep(values.get_value(LOAD_SECONDS))
            after_load.get(fault, lambda: None)()

        async def close() -> None:
            print("closed", flush=True)
            if fault == "close-hangs":
                await asyncio.sleep(3600)
            if fault == "thread-hangs":
                threading.Thread(target=time.sleep, args=(3600,)).start()

        life = Life(start=start, close=close, cut=service.cut, kill=kill)
        return await server.serve(life, owns_process=True)

    return run(serve, event_loop=values.get_value(EVENT_LOOP))


if __name__ == "__main__":
    sys.exit(main())
