"""The Rust path over the stub core, as a process of its own: `python -m tests.support.rust_child`.

Its own flags are below; after `--` come those of the stub core.
"""

from __future__ import annotations

import argparse
import asyncio
import signal
import sys
from functools import partial

from smg_grpc_servicer.core import logs
from smg_grpc_servicer.core.network import Address
from smg_grpc_servicer.core.process import run
from smg_grpc_servicer.rust import child, knobs
from smg_grpc_servicer.rust.plan import (
    EngineAddress,
    EngineProcess,
    Keyword,
    RustPlan,
)
from smg_grpc_servicer.rust.supervisor import serve
from smg_grpc_servicer.vllm.warm_up import over_grpc
from smg_grpc_servicer.warmup.plan import Shape, make
from tests.support import stub_core

SHAPE = Shape(step_tokens=512, context=4096, vocab=32000, window=32)
"""Of the stub core."""


async def warm_up(address: str) -> None:
    """Until SIGUSR1."""
    told = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGUSR1, told.set)
    print(f"warming {address}", flush=True)
    await told.wait()


def main() -> int:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--exit-seconds", type=float, default=5.0)
    parser.add_argument("--grace", type=float, default=15.0)
    parser.add_argument("--tcp", action="store_true")
    parser.add_argument("--warm-up", action="store_true")
    parser.add_argument("--planned", type=float, help="a planned warm-up of so many seconds")
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--metrics", action="store_true")
    parser.add_argument("core", nargs="*")
    given = parser.parse_args()
    logs.configure("debug")
    warming = warm_up if given.warm_up else None
    if given.planned is not None:
        warming = partial(over_grpc, make("fast", SHAPE), given.planned)

    def launch(address: EngineAddress) -> list[EngineProcess]:
        processes: list[EngineProcess] = []
        for rank in range(given.ranks):
            flags = ["--handshake", address.url, "--index", str(rank), *given.core]
            core = stub_core.options(flags)
            processes.append(child.start(stub_core.run, core, grace=given.grace))
        return processes

    async def main() -> int:
        plan = RustPlan(
            engine="vllm",
            server_class="VllmGrpcServer",
            model_path="/nowhere/tiny",
            host="127.0.0.1",
            port=given.port,
            launch=launch,
            knobs=knobs.resolve("vllm"),
            keywords={
                "served_model_name": Keyword("tiny"),
                "max_context_length": Keyword(4096),
                "vocab_size": Keyword(32000),
                "runs_mooncake": Keyword(False),
            },
            metrics=Address("127.0.0.1", 0) if given.metrics else None,
            warm_up=warming,
            engine_count=given.ranks,
            ipc_handshake=not given.tcp,
            engine_exit_seconds=given.exit_seconds,
        )
        return await serve(plan)

    return run(main)


if __name__ == "__main__":
    sys.exit(main())
