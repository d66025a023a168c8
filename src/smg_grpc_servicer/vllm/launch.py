"""`vllm serve --grpc` through our own server: what `launcher_switch` puts in `serve_grpc`'s place.

With `--servicer-impl rust` that is `rust.serve`; the rest is about the Python one.

The port is bound first and answers NOT_SERVING while vLLM loads; TLS and tokens come from vLLM's
own flags or ours; SIGTERM drains; a dead engine ends the process. A setting that cannot work is
one line on standard error and exit code 2, before anything is bound. On a vLLM whose launcher we
do not know, its own server runs, unless that would leave out TLS or tokens: then exit code 2.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import time
from collections.abc import Callable, Coroutine
from functools import partial
from types import FunctionType
from typing import Any

from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from smg_grpc_servicer.core import tracing
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.late import LateService
from smg_grpc_servicer.core.metrics import Metrics, RecordedMetrics
from smg_grpc_servicer.core.options import COALESCE_SECONDS, MAX_CHUNK_TOKENS, STALL
from smg_grpc_servicer.core.process import leave_at_exit, print_config_error
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.core.tracing import Spans
from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.kv_events.cursor import too_early
from smg_grpc_servicer.vllm import impl, kv_events, log_lines, stats, warm_up
from smg_grpc_servicer.vllm.engine_life import EngineLife, Launcher, LauncherChanged
from smg_grpc_servicer.vllm.headless import START_METHOD
from smg_grpc_servicer.vllm.options import Plan, as_written, plan
from smg_grpc_servicer.vllm.wire import VllmWire

log = logging.getLogger(__name__)

Implementation = Callable[[argparse.Namespace], Coroutine[Any, Any, int | None]]
"""Serves a launch; gives the exit code, or None for 0."""

MULTIPROC = "PROMETHEUS_MULTIPROC_DIR"
"""Where somebody else may collect what vLLM counts."""

_SERVICE = vllm_engine_pb2.DESCRIPTOR.services_by_name["VllmEngine"]


async def serve_grpc(args: argparse.Namespace, stock: FunctionType) -> None:
    """Serve until asked to stop; `stock` is the launcher's own function.

    :raises SystemExit: with the exit code, when it is not 0.
    """
    try:
        asked = plan(args)
        log_lines.settle(asked.values)
        impl.resolve_servicer_impl(args)
        serve = implementation(asked, stock)
        code = await serve(args) or 0
    except ConfigError as error:
        print_config_error(as_written(error, args))
        code = 2
    finally:
        auto.clean()
    leave_at_exit("vllm", code)
    if code:
        raise SystemExit(code)


def implementation(asked: Plan, stock: FunctionType) -> Implementation:
    """Who serves this launch.

    :raises ConfigError: only vLLM's own server could, and it would leave out what was asked for.
    """
    if asked.impl == impl.RUST:
        from smg_grpc_servicer.vllm import rust

        return lambda args: rust.serve(args, asked)
    try:
        launcher = Launcher.of(stock)
    except LauncherChanged as error:
        if asked.security:
            raise ConfigError(
                f"--grpc: this vLLM's launcher is not known here ({error}), and its own server has "
                f"no {' and no '.join(asked.security)}; allowed: vLLM 0.28 to 0.33"
            ) from None
        log.warning("vLLM's own gRPC server runs: its launcher is not known here (%s)", error)
        return stock
    return lambda args: serve(args, asked, launcher)


async def serve(args: argparse.Namespace, asked: Plan, launcher: Launcher) -> int:
    """Bind, load, warm, serve, drain; the exit code."""
    started_at = time.time()
    log.info("vLLM %s, settings: %s", launcher.version, asked.values.changed())
    # A forked engine would hold our port and grpc's locks. vLLM's own command sets the same;
    # `python -m` of the launcher does not. The children read it.
    os.environ.setdefault(START_METHOD, "spawn")
    kv_events.configure(args)
    board = StatusBoard(stall_seconds=asked.values.get_value(STALL))
    metrics: Metrics | None = None
    if asked.server.metrics_port is not None:
        metrics = RecordedMetrics(
            "vllm", model_name(args), state=lambda: board.condition, others=stats.families
        )
    spans = tracing.configure("smg-grpc-servicer-vllm")
    late = LateService(
        vllm_engine_pb2_grpc.add_VllmEngineServicer_to_server,
        _SERVICE.methods_by_name,
        board,
        early={"SubscribeKvEvents": too_early},
    )
    server = GrpcServer(asked.server, board, metrics)
    server.add(late.add_to, VllmWire.service)

    def servicer(async_llm: Any) -> Any:
        made = _servicer(async_llm, started_at, asked, board, metrics, spans)
        late.fill(made)
        return made

    def build() -> Any:
        async_llm = launcher.build(args)
        if metrics is None and MULTIPROC not in os.environ:
            stats.without_prometheus(async_llm)
        return async_llm

    engine = EngineLife(
        build,
        servicer,
        stats_seconds=None if args.disable_log_stats else launcher.envs.VLLM_LOG_STATS_INTERVAL,
        warm_up=partial(warm_up.in_process, asked.warm_up),
    )
    life = Life(engine.start, engine.warm_up, engine.close, engine.cut, engine.kill)
    try:
        return await server.serve(life, owns_process=True)
    finally:
        await asyncio.to_thread(spans.close)


def model_name(args: argparse.Namespace) -> str:
    """What clients call the model."""
    names = vars(args).get("served_model_name")
    if isinstance(names, (list, tuple)):
        names = next(iter(names), None)
    return str(names or args.model)


def _servicer(
    async_llm: Any,
    started_at: float,
    asked: Plan,
    board: StatusBoard,
    metrics: Metrics | None,
    spans: Spans,
) -> Any:
    # Imported now and not with this module: it brings in vLLM.
    from smg_grpc_servicer.vllm.servicer import VllmEngineServicer

    return VllmEngineServicer(
        async_llm,
        started_at,
        board=board,
        metrics=metrics,
        spans=spans,
        max_chunk_tokens=asked.values.get_value(MAX_CHUNK_TOKENS),
        coalesce_seconds=asked.values.get_value(COALESCE_SECONDS),
    )
