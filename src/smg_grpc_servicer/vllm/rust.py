"""`--servicer-impl rust`: requests are answered by the wheel `smg`, vLLM runs headless beside it.

`serve_rust(args)` takes a parsed gRPC launch to its end. Everything that can be refused is, before
vLLM is loaded or a port bound: one line on standard error and exit code 2.
`python -m smg_grpc_servicer.vllm.rust` tells what the installed wheel can do.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.network import Address
from smg_grpc_servicer.core.options import DRAIN_SECONDS, LOG_LEVEL, METRICS_PORT
from smg_grpc_servicer.core.process import print_config_error
from smg_grpc_servicer.rust import knobs, supervisor
from smg_grpc_servicer.rust.binding import init_tracing, load_binding
from smg_grpc_servicer.rust.knobs import RustKnobs
from smg_grpc_servicer.rust.plan import RustPlan
from smg_grpc_servicer.vllm import headless, kv_events
from smg_grpc_servicer.vllm.engine_life import on_thread
from smg_grpc_servicer.vllm.facts import installed_version
from smg_grpc_servicer.vllm.log_lines import settle
from smg_grpc_servicer.vllm.options import Plan, as_written, plan
from smg_grpc_servicer.vllm.rust_facts import Facts
from smg_grpc_servicer.vllm.rust_options import refuse_what_rust_lacks, refuse_what_the_wheel_lacks
from smg_grpc_servicer.vllm.tokenizer_dir import tokenizer_dir
from smg_grpc_servicer.vllm.upstream import require_upstream_hook, upstream_hook_installed
from smg_grpc_servicer.vllm.warm_up import over_grpc, plan_of
from smg_grpc_servicer.warmup.plan import NOTHING

__all__ = ["require_upstream_hook", "serve", "serve_rust", "upstream_hook_installed"]

log = logging.getLogger(__name__)

SERVER_CLASS = "VllmGrpcServer"
EXIT_SECONDS = 30.0
"""How long vLLM may take to end, beyond its own `--shutdown-timeout`."""


async def serve_rust(args: argparse.Namespace) -> int:
    """Serve a parsed gRPC launch from Rust; the exit code, 2 for a setting that cannot work."""
    try:
        asked = plan(args)
        settle(asked.values)
        return await serve(args, asked)
    except ConfigError as error:
        print_config_error(as_written(error, args))
        return 2


async def serve(args: argparse.Namespace, asked: Plan) -> int:
    """The same of a launch whose settings are known.

    :raises ConfigError: a setting cannot work; nothing is left running.
    """
    chosen = knobs_of(asked)
    refuse_what_rust_lacks(args, asked)
    headless.require_local(args)
    binding = load_binding(SERVER_CLASS)
    refuse_what_the_wheel_lacks(asked.media, binding)
    log.info("%s serves vLLM %s", binding.wheel, installed_version())
    init_tracing(_rust_level(asked))
    kv_events.configure(args, binds=True)
    config = await asyncio.wrap_future(on_thread(lambda: _engine_config(args), "vllm-config"))
    code = await supervisor.serve(_plan(args, asked, chosen, config))
    gc.freeze()  # the process ends now, and a last search through all of vLLM would take seconds
    return code


def knobs_of(asked: Plan) -> RustKnobs:
    """Those of the Rust path; a drain that was set by the flag of all our servers wins."""
    found = knobs.resolve("vllm")
    seconds, source = asked.values.get_value(DRAIN_SECONDS), asked.values.sources["drain_seconds"]
    elsewhere = source != "default" or seconds != DRAIN_SECONDS.default
    if source == "flag" or (elsewhere and "drain_seconds" not in found.asked):
        found = replace(found, drain_seconds=seconds)
    return found


def _plan(args: argparse.Namespace, asked: Plan, chosen: RustKnobs, vllm_config: Any) -> RustPlan:
    directory = tokenizer_dir(vllm_config)
    facts = Facts.of(
        vllm_config,
        log_stats=not args.disable_log_stats,
        media=asked.media,
        tokenizer_dir=directory,
    )
    server = asked.server
    metrics = None
    if server.metrics_port is not None:
        metrics = Address(server.metrics_host or server.host, server.metrics_port)
    ranks = headless.ranks_of(args)
    warm_up = NOTHING
    if facts.model.is_generation:
        warm_up = plan_of(vllm_config, asked.warm_up.level, range(ranks))
    return RustPlan(
        engine="vllm",
        server_class=SERVER_CLASS,
        model_path=facts.model.model_path,
        host=server.host,
        port=server.port,
        launch=lambda address: [headless.launch(args, address)],
        knobs=chosen,
        keywords=facts.keywords,
        engine_count=ranks,
        tokenizer_dir=directory,
        metrics=metrics,
        metrics_asked=_written(asked, METRICS_PORT.name) or "--metrics-port",
        warm_up=partial(over_grpc, warm_up, asked.warm_up.seconds) if warm_up.steps else None,
        ipc_handshake=True,
        engine_exit_seconds=EXIT_SECONDS + (vars(args).get("shutdown_timeout") or 0),
    )


def _engine_config(args: argparse.Namespace) -> Any:
    """What the engine will be, in vLLM's own words."""
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.usage.usage_lib import UsageContext

    made = AsyncEngineArgs.from_cli_args(headless.aimed(args))
    return made.create_engine_config(usage_context=UsageContext.OPENAI_API_SERVER, headless=True)


def _rust_level(asked: Plan) -> str | None:
    """Rust logs at the level of our log where somebody chose one and RUST_LOG does not say."""
    chosen = asked.values.sources[LOG_LEVEL.name] != "default"
    return asked.values.get_value(LOG_LEVEL) if chosen and "RUST_LOG" not in os.environ else None


def _written(asked: Plan, name: str) -> str | None:
    source = asked.values.sources[name]
    return source.removeprefix("env ") if source.startswith("env ") else None


def main(argv: Sequence[str] | None = None) -> int:
    """Print what the installed wheel and the installed vLLM can do; 2 when there is no wheel."""
    argparse.ArgumentParser(
        prog="python -m smg_grpc_servicer.vllm.rust",
        description="Tell what the installed wheel smg can do, and whether this vLLM leads here.",
    ).parse_args(argv)
    try:
        binding = load_binding(SERVER_CLASS)
    except ConfigError as error:
        print_config_error(error)
        return 2
    hooked = "leads to this package" if upstream_hook_installed() else "does not lead here"
    lines = [
        *binding.describe(),
        f"vLLM {installed_version() or 'is not installed'}: its gRPC launcher {hooked}",
    ]
    sys.stdout.write("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
