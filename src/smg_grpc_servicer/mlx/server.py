"""The MLX server: settings, engine, servicer, and the shared life of a server around them."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from importlib.util import find_spec

from smg_grpc_proto.generated import mlx_engine_pb2_grpc

from smg_grpc_servicer import __version__
from smg_grpc_servicer.core import logs, metrics_server
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.metrics import Metrics, RecordedMetrics
from smg_grpc_servicer.core.options import EVENT_LOOP, LOG_FORMAT, LOG_LEVEL, STALL, ServerOptions
from smg_grpc_servicer.core.process import print_config_error, run
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.core.settings import Values
from smg_grpc_servicer.mlx.adapter import MlxEngine
from smg_grpc_servicer.mlx.options import MlxOptions, ignored_variables, mlx_settings
from smg_grpc_servicer.mlx.servicer import MlxEngineServicer

log = logging.getLogger(__name__)

SWITCH_SECONDS = 0.0005
"""How long a thread keeps the GIL: at Python's 5 ms the generation thread waits a whole step."""


def main(argv: Sequence[str] | None = None) -> None:
    """`python -m smg_grpc_servicer.mlx`; leaves with the exit code of `core.process`."""
    parser = argparse.ArgumentParser(
        prog="python -m smg_grpc_servicer.mlx",
        description="Serve an MLX model over gRPC to the SMG gateway.",
    )
    parser.add_argument("--version", action="version", version=__version__)
    settings = mlx_settings()
    settings.add_to(parser)
    args = parser.parse_args(argv)
    try:
        values = settings.resolve(args)
        logs.configure(values.get_value(LOG_LEVEL), values.get_value(LOG_FORMAT))
        event_loop = values.get_value(EVENT_LOOP)
        options = ServerOptions.from_values(values)
        if options.metrics_port is not None:
            metrics_server.require_extra()
        _require_mlx()
    except ConfigError as error:
        print_config_error(error)
        raise SystemExit(2) from None
    raise SystemExit(run(lambda: serve(values, options), event_loop=event_loop))


async def serve_grpc(args: argparse.Namespace) -> int:
    """Serve by a namespace with the flags' names; the exit code. For embedding launchers."""
    values = mlx_settings().resolve(args)
    return await serve(values, ServerOptions.from_values(values))


async def serve(values: Values, options: ServerOptions) -> int:
    """Bind, load, warm, serve, drain; the exit code."""
    for name in ignored_variables():
        log.warning("%s has no effect: no request waits for others", name)
    log.info("settings: %s", values.changed())
    mlx_options = MlxOptions.from_values(values)
    board = StatusBoard(stall_seconds=values.get_value(STALL))
    metrics: Metrics | None = None
    if options.metrics_port is not None:
        name = mlx_options.served_model_name or mlx_options.model
        metrics = RecordedMetrics("mlx", name, state=lambda: board.reason)
    engine = MlxEngine(mlx_options)
    servicer = MlxEngineServicer(engine, board, metrics=metrics)
    server = GrpcServer(options, board, metrics)
    server.add(
        lambda grpc_server: mlx_engine_pb2_grpc.add_MlxEngineServicer_to_server(
            servicer, grpc_server
        ),
        servicer.wire.service,
    )
    sys.setswitchinterval(SWITCH_SECONDS)
    life = Life(engine.start, engine.warm_up, engine.close, servicer.table.cut_all)
    return await server.serve(life, owns_process=True)


def _require_mlx() -> None:
    """:raises ConfigError: mlx or mlx-lm is not installed, before anything is bound."""
    for name in ("mlx", "mlx_lm"):
        if find_spec(name) is None:
            raise ConfigError(
                f'{name} is not installed; run: pip install "smg-grpc-servicer[mlx]"'
            )


if __name__ == "__main__":
    main()
