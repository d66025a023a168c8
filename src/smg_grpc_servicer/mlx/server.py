"""The MLX server: settings, engine, servicer, and the shared life of a server around them."""

from __future__ import annotations

from smg_grpc_servicer.core.quiet import silence_core

if __name__ == "__main__":
    silence_core()  # before grpc is imported

import argparse
import asyncio
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from smg_grpc_servicer.core import tracing
from smg_grpc_servicer.core.command import command
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.metrics import Metrics, RecordedMetrics
from smg_grpc_servicer.core.options import COALESCE_SECONDS, MAX_CHUNK_TOKENS, STALL, ServerOptions
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.core.settings import Values
from smg_grpc_servicer.mlx.adapter import MlxEngine
from smg_grpc_servicer.mlx.options import MlxOptions, ignored_variables, mlx_settings
from smg_grpc_servicer.mlx.servicer import MlxEngineServicer

log = logging.getLogger("smg_grpc_servicer.mlx.server")  # also where this module is __main__

SWITCH_SECONDS = 0.0005
"""How long a thread keeps the GIL: at Python's 5 ms the generation thread waits a whole step."""


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m smg_grpc_servicer.mlx`."""
    command(
        "smg_grpc_servicer.mlx",
        "Serve an MLX model over gRPC to the SMG gateway.",
        mlx_settings(),
        serve,
        require=_require_mlx,
        argv=argv,
    )


async def serve_grpc(args: argparse.Namespace) -> int:
    """Serve by a namespace with the flags' names; the exit code. For launchers that embed us."""
    values = mlx_settings().resolve(args)
    return await serve(values, ServerOptions.from_values(values))


async def serve(values: Values, options: ServerOptions) -> int:
    """Bind, load, warm, serve, drain; the exit code."""
    for name in ignored_variables():
        log.warning("%s has no effect: no request waits for others", name)
    changed = values.changed()
    text = ", ".join(f"{name}={value}" for name, value in changed.items())
    log.info("settings: %s", text, extra={"settings": changed})
    mlx_options = MlxOptions.from_values(values)
    board = StatusBoard(stall_seconds=values.get_value(STALL))
    metrics: Metrics | None = None
    if options.metrics_port is not None:
        name = mlx_options.served_model_name or mlx_options.model
        metrics = RecordedMetrics("mlx", name, state=lambda: board.condition)
    spans = tracing.configure("smg-grpc-servicer-mlx")
    engine = MlxEngine(mlx_options)
    servicer = MlxEngineServicer(
        engine,
        board,
        metrics=metrics,
        spans=spans,
        max_chunk_tokens=values.get_value(MAX_CHUNK_TOKENS),
        coalesce_seconds=values.get_value(COALESCE_SECONDS),
    )
    server = GrpcServer(options, board, metrics)
    server.add(
        lambda grpc_server: mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(
            servicer, grpc_server
        ),
        servicer.wire.service,
    )
    sys.setswitchinterval(SWITCH_SECONDS)

    async def start() -> None:
        await engine.start()
        if engine.on_cpu:
            servicer.table.write_less()

    life = Life(start, engine.warm_up, engine.close, servicer.table.cut_all)
    try:
        return await server.serve(life, owns_process=True)
    finally:
        await asyncio.to_thread(spans.close)


def _require_mlx() -> None:
    """:raises ConfigError: mlx or mlx-lm is not installed."""
    for name in ("mlx", "mlx_lm"):
        if find_spec(name) is None:
            raise ConfigError(f'{name} is not installed; run: pip install "smg-grpc-servicer[mlx]"')


if __name__ == "__main__":
    main()
