"""`serve_grpc(server_args, …)`: what `sglang serve --smg-grpc-mode` calls, and its whole server.

The port is bound first and answers NOT_SERVING while the ranks load; TLS and a token come from
SGLang's own flags; SIGTERM drains; a rank that dies ends the process with code 1. A setting that
cannot work, and a SGLang that is too old, is one line on standard error and exit code 2.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Coroutine, Mapping
from typing import Any

from smg_grpc_proto.generated import sglang_scheduler_pb2, sglang_scheduler_pb2_grpc

from smg_grpc_servicer.core import logs, tracing
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.late import LateService
from smg_grpc_servicer.core.metrics import Metrics, RecordedMetrics
from smg_grpc_servicer.core.options import COALESCE_SECONDS, LOG_FORMAT, MAX_CHUNK_TOKENS, STALL
from smg_grpc_servicer.core.process import leave_at_exit, print_config_error
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.core.tracing import Spans
from smg_grpc_servicer.kv_events import auto
from smg_grpc_servicer.kv_events.cursor import too_early
from smg_grpc_servicer.sglang import kv_events, overflow, plugin, processes, releases
from smg_grpc_servicer.sglang.engine_life import EngineLife
from smg_grpc_servicer.sglang.options import Plan, as_written, plan
from smg_grpc_servicer.sglang.servicer import SGLangSchedulerServicer
from smg_grpc_servicer.sglang.wire import SglangWire

log = logging.getLogger(__name__)

Hook = Callable[[Any, Any, Any], Coroutine[Any, Any, object]]
Implementation = Callable[[Any], Coroutine[Any, Any, int]]
"""Serves a launch; gives the exit code."""

_SERVICE = sglang_scheduler_pb2.DESCRIPTOR.services_by_name["SglangScheduler"]


async def serve_grpc(
    server_args: Any,
    model_info: Mapping[str, Any] | None = None,
    on_request_manager_ready: Hook | None = None,
) -> None:
    """Serve until asked to stop.

    :param model_info: model facts that replace SGLang's own.
    :param on_request_manager_ready: awaited with (request_manager, server_args, scheduler_info)
        once the ranks are ready, before requests are taken.
    :raises SystemExit: with the exit code, when it is not 0.
    """
    try:
        releases.require()
        from sglang.srt.arg_groups.model_override_base import resolving_view

        # Ranks inherit it; an operator's own choice stays.
        os.environ.setdefault(overflow.SANITIZE, "1")
        server_args.resolve_once()
        config = resolving_view(server_args)
        asked = plan(config, given=plugin.given(server_args))
        serve_it = implementation(asked, config, model_info, on_request_manager_ready)
        code = await serve_it(server_args)
    except ConfigError as error:
        print_config_error(as_written(error))
        code = 2
    leave_at_exit("sglang", code)
    if code:
        raise SystemExit(code)


def _settle_log(asked: Plan, config: Any) -> None:
    """Our lines in the form that was asked for, SGLang's in its own; by default it prints both."""
    if asked.values.sources[LOG_FORMAT.name] != "default":
        logs.configure(config.log_level, asked.values.get_value(LOG_FORMAT))


def implementation(
    asked: Plan,
    config: Any,
    model_info: Mapping[str, Any] | None,
    hook: Hook | None,
) -> Implementation:
    """Who serves this launch; SMG_SGLANG_SERVICER_IMPL has one value so far."""
    if config.node_rank > 0:
        return follow
    return lambda args: serve(args, config, asked, model_info, hook)


async def serve(
    server_args: Any,
    config: Any,
    asked: Plan,
    model_info: Mapping[str, Any] | None,
    hook: Hook | None,
) -> int:
    """Bind, load, warm, serve, drain; the exit code."""
    _settle_log(asked, config)
    log.info("SGLang %s, settings: %s", releases.installed(), asked.values.changed())
    releases.warn_if_new()
    if config.admin_api_key:
        log.warning("--admin-api-key has no effect with --smg-grpc-mode: --api-key is for all")
    kv_events.configure(server_args, config)
    board = StatusBoard(stall_seconds=asked.values.get_value(STALL))
    metrics: Metrics | None = None
    if asked.server.metrics_port is not None:
        name = config.served_model_name or config.model_path
        metrics = RecordedMetrics("sglang", name, state=lambda: board.condition)
    spans: Spans = tracing.configure("smg-grpc-servicer-sglang")
    late = LateService(
        sglang_scheduler_pb2_grpc.add_SglangSchedulerServicer_to_server,
        _SERVICE.methods_by_name,
        board,
        early={"SubscribeKvEvents": too_early},
    )
    server = GrpcServer(asked.server, board, metrics)
    server.add(late.add_to, SglangWire.service)

    def servicer(manager: Any, parts: Any, ready: Mapping[str, Any]) -> Any:
        made = SGLangSchedulerServicer(
            manager,
            server_args,
            model_info,
            ready,
            parts=parts,
            board=board,
            metrics=metrics,
            spans=spans,
            max_chunk_tokens=asked.values.get_value(MAX_CHUNK_TOKENS),
            coalesce_seconds=asked.values.get_value(COALESCE_SECONDS),
        )
        late.fill(made)
        return made

    engine = EngineLife(
        server_args, servicer, hook=hook, skip_warm_up=asked.skip_warm_up, warm_up=asked.warm_up
    )
    life = Life(engine.start, engine.warm_up, engine.close, engine.cut, engine.kill)
    try:
        return await server.serve(life, owns_process=True)
    except ConfigError:
        raise
    except processes.RanksFailed as error:
        log.error("SGLang did not start: %s", error)
    except Exception:
        log.exception("the server ended with an error")
    finally:
        auto.clean()
        await asyncio.to_thread(spans.close)
    return 1


async def follow(server_args: Any) -> int:
    """A node that is not the first runs ranks and nothing of ours, for as long as they live."""
    releases.require(releases.LAUNCHER)
    # On this thread, which has the signals: SGLang sets its own handlers here.
    processes.follow(server_args)
    return 0
