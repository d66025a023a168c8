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
import signal
from collections.abc import Callable
from typing import Any

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.rust import child, guard
from smg_grpc_servicer.rust.plan import EngineAddress, EngineProcess
from smg_grpc_servicer.vllm import engine_guard, log_lines

log = logging.getLogger(__name__)

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


def launch(
    args: argparse.Namespace, address: EngineAddress, refused: frozenset[str]
) -> EngineProcess:
    """Start it; `refused` are what `engine_guard.install` takes."""
    environ = {START_METHOD: "spawn", **os.environ}
    return child.start(run, aimed(args), address, refused, env=environ)


def run(args: argparse.Namespace, address: EngineAddress, refused: frozenset[str]) -> int:
    """In the child: until the engine ends or SIGTERM comes; the exit code."""
    from vllm.entrypoints.cli import serve

    log_lines.configure("info", None)
    _fill(args)
    if address.is_ipc:
        _dial(vars(serve), address.url)
    else:
        args.data_parallel_rpc_port = address.port
    managers = _watch(vars(serve))
    engine_guard.spread(refused)
    try:
        serve.run_headless(args)
    except SystemExit as asked:
        return asked.code if isinstance(asked.code, int) else 0
    finally:
        gc.freeze()  # nobody looks for garbage in all of torch while the interpreter ends: seconds
    for manager in managers:
        # The others were ended because of it.
        _end_like(manager.failed_proc_name, manager.finished_procs())
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


def _watch(names: dict[str, Any]) -> list[Any]:
    """Keeps who starts the engines, to be asked for their exit codes."""
    stock: Callable[..., Any] = names["CoreEngineProcManager"]
    kept: list[Any] = []

    def made(*args: Any, **kwargs: Any) -> Any:
        manager = stock(*args, **kwargs)
        kept.append(manager)
        return manager

    names["CoreEngineProcManager"] = made
    return kept


def _end_like(failed: str | None, finished: dict[str, int]) -> None:
    """End this process by the signal, or with the code, that ended the engine `failed`."""
    if failed is None:
        return
    code = finished[failed]
    if code > 0:
        log.error("%s ended with exit code %d", failed, code)
        raise SystemExit(code)
    log.error("%s was ended by %s", failed, signal.Signals(-code).name)
    guard.end_by(-code)
