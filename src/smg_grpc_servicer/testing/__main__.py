"""`python -m smg_grpc_servicer.testing --engine vllm`: any of the four protos, without an engine.

For people who test a gateway or a client: the whole server, with the FakeEngine behind it.
"""

from __future__ import annotations

from smg_grpc_servicer.core import parsers
from smg_grpc_servicer.core.command import command
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.metrics import Metrics, RecordedMetrics
from smg_grpc_servicer.core.options import (
    COALESCE_SECONDS,
    MAX_CHUNK_TOKENS,
    STALL,
    ServerOptions,
    server_settings,
)
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.core.settings import Setting, Settings, Values
from smg_grpc_servicer.mlx import demo
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.fake_engine import FakeEngine
from smg_grpc_servicer.testing.servicers import servicer_for

ENGINE = Setting(
    "engine",
    parsers.one_of(*DIALECTS),
    "mlx",
    "whose proto to serve",
    "--engine",
    "SMG_TESTING_ENGINE",
)
TOKENS_PER_STEP = Setting(
    "tokens_per_step",
    parsers.POSITIVE_INT,
    1,
    "tokens that each choice gets in one step",
    "--tokens-per-step",
    "SMG_TESTING_TOKENS_PER_STEP",
)
STEP_SECONDS = Setting(
    "step_seconds",
    parsers.SECONDS,
    0.01,
    "how long a step takes; 0 = as fast as it goes",
    "--step-seconds",
    "SMG_TESTING_STEP_SECONDS",
)
LOAD_SECONDS = Setting(
    "load_seconds",
    parsers.SECONDS,
    0.0,
    "how long loading takes",
    "--load-seconds",
    "SMG_TESTING_LOAD_SECONDS",
)
TOKENIZER = Setting(
    "tokenizer",
    parsers.TEXT,
    str(demo.path()),
    "directory of tokenizer files to hand out",
    "--tokenizer",
    "SMG_TESTING_TOKENIZER",
)


async def serve(values: Values, options: ServerOptions) -> int:
    """Serve until told to stop; the exit code."""
    dialect = DIALECTS[values.get_value(ENGINE)]
    board = StatusBoard(stall_seconds=values.get_value(STALL))
    engine = FakeEngine(
        tokens_per_step=values.get_value(TOKENS_PER_STEP),
        step_seconds=values.get_value(STEP_SECONDS),
        load_seconds=values.get_value(LOAD_SECONDS),
        tokenizer=values.get_value(TOKENIZER),
    )
    metrics: Metrics | None = None
    if options.metrics_port is not None:
        metrics = RecordedMetrics(dialect.engine, "fake", state=lambda: board.condition)
    servicer = servicer_for(
        dialect,
        engine,
        board,
        metrics=metrics,
        max_chunk_tokens=values.get_value(MAX_CHUNK_TOKENS),
        coalesce_seconds=values.get_value(COALESCE_SECONDS),
    )
    server = GrpcServer(options, board, metrics)
    server.add(lambda grpc_server: dialect.registrar()(servicer, grpc_server), dialect.service)
    life = Life(engine.start, engine.warm_up, engine.close, servicer.table.cut_all)
    return await server.serve(life, owns_process=True)


def main() -> None:
    settings = Settings(ENGINE, TOKENS_PER_STEP, STEP_SECONDS, LOAD_SECONDS, TOKENIZER)
    command(
        "smg_grpc_servicer.testing",
        "Serve one of the four protos with a fake engine behind it.",
        settings + server_settings("testing"),
        serve,
    )


if __name__ == "__main__":
    main()
