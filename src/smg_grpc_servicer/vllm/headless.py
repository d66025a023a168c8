"""vLLM without a front end, in a process of its own: what the Rust server serves.

vLLM's own headless path (`vllm serve --headless`) is run on the parsed command line of a gRPC
launch, aimed at a handshake address on this host. Around it, in that process only: the handshake
may be a socket file instead of a port, requests that would kill the engine are refused
(`engine_guard`), and the process ends the way its engine did, so that whoever watches it can say.
"""

from __future__ import annotations

import argparse
import gc
import logging
import os
from collections.abc import Callable
from time import monotonic, sleep
from typing import Any, NoReturn

from smg_grpc_servicer.core.children import in_words
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.process import flush, leave
from smg_grpc_servicer.rust import child, guard
from smg_grpc_servicer.rust.plan import EngineAddress, EngineProcess
from smg_grpc_servicer.vllm import engine_guard, log_lines

log = logging.getLogger(__name__)

CODE_SECONDS = 5.0
"""What the kernel may take to end a process that was killed."""
START_METHOD = "VLLM_WORKER_MULTIPROC_METHOD"

_ELSEWHERE = {
    "data_parallel_rank": "--data-parallel-rank",
    "data_parallel_start_rank": "--data-parallel-start-rank",
    "data_parallel_external_lb": "--data-parallel-external-lb",
    "data_parallel_hybrid_lb": "--data-parallel-hybrid-lb",
    "data_parallel_multi_port_external_lb": "--data-parallel-multi-port-external-lb",
}


def require_local(args: argparse.Namespace) -> None:
    """:raises ConfigError: some of the engine's ranks would not be on this host, or not ours."""
    given = vars(args)
    # Rank 0 is a choice too.
    unset = (None, False)
    flags = [
        flag
        for name, flag in _ELSEWHERE.items()
        if not any(given.get(name) is nothing for nothing in unset)
    ]
    ranks, local = ranks_of(args), given.get("data_parallel_size_local")
    if local not in (None, ranks):
        flags.append("--data-parallel-size-local")
    if given.get("data_parallel_backend", "mp") != "mp":
        flags.append("--data-parallel-backend")
    if flags:
        raise ConfigError(
            f"{', '.join(flags)}: not supported with --servicer-impl rust; "
            "allowed: --data-parallel-size, all ranks on this host"
        )


def ranks_of(args: argparse.Namespace) -> int:
    """How many engines will dial the handshake."""
    size = vars(args).get("data_parallel_size")
    return size if isinstance(size, int) and size > 0 else 1


def aimed(args: argparse.Namespace) -> argparse.Namespace:
    """The same command line as a headless one on this host."""
    ranks = ranks_of(args)
    ours = {name for name in vars(args) if name.startswith("smg_")}
    given = {name: value for name, value in vars(args).items() if name not in ours}
    given.pop("dispatch_function", None)
    return argparse.Namespace(
        **{
            **given,
            "grpc": False,
            "headless": True,
            "model_tag": None,
            "api_server_count": 0,
            "data_parallel_size": ranks,
            "data_parallel_size_local": ranks,
            "data_parallel_address": "127.0.0.1",
        }
    )


def launch(args: argparse.Namespace, address: EngineAddress) -> EngineProcess:
    """Start it."""
    environ = {START_METHOD: "spawn", **os.environ}
    return child.start(run, aimed(args), address, env=environ)


def run(args: argparse.Namespace, address: EngineAddress) -> int:
    """In the child: until the engine ends or SIGTERM comes; the exit code."""
    from vllm.entrypoints.cli import serve

    log_lines.configure("info", None)
    _fill(args)
    if address.is_ipc:
        _dial(vars(serve), address.url)
    else:
        args.data_parallel_rpc_port = address.port
    _watch(vars(serve))
    engine_guard.spread()
    try:
        serve.run_headless(args)
    except SystemExit as asked:
        return asked.code if isinstance(asked.code, int) else 0
    finally:
        gc.freeze()  # nobody looks for garbage in all of torch while the interpreter ends: seconds
    return 1


def _fill(args: argparse.Namespace) -> None:
    """Flags that only `vllm serve` has, for launches through `python -m`: their defaults."""
    from vllm.entrypoints.cli.serve import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    defaults = make_arg_parser(FlexibleArgumentParser()).parse_args([])
    for name, value in vars(defaults).items():
        if name not in vars(args):
            setattr(args, name, value)


def _dial(names: dict[str, Any], url: str) -> None:
    """The engines dial `url` where they would dial a host and port."""
    names["get_tcp_uri"] = lambda host, port: url


def _watch(names: dict[str, Any]) -> None:
    """Whoever starts the engines ends this process as soon as one has failed.

    vLLM would first give the other ranks seconds to end, in which nobody hears of it.
    """
    stock: Callable[..., Any] = names["CoreEngineProcManager"]

    def made(*args: Any, **kwargs: Any) -> Any:
        manager = stock(*args, **kwargs)
        shut_down = manager.shutdown

        def shutdown(*args: Any, **kwargs: Any) -> None:
            if manager.failed_proc_name is not None:
                _end_like(manager)
            shut_down(*args, **kwargs)

        manager.shutdown = shutdown
        return manager

    names["CoreEngineProcManager"] = made


def _end_like(manager: Any) -> NoReturn:
    """End this process by the signal, or with the code, that ended the engine which failed.

    The other ranks end with us (`guard`).
    """
    failed = manager.failed_proc_name
    until = monotonic() + CODE_SECONDS
    # A killed process lets go of what vLLM waits on before it has an exit code.
    while (code := manager.finished_procs().get(failed)) is None and monotonic() < until:
        sleep(0.01)
    log.error("%s %s", failed, in_words(code))
    if code is not None and code < 0:
        flush()
        guard.end_by(-code)
    leave(code or 1, flush)
