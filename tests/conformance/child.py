"""The fake engine behind our own server as a process: for what only a process can show.

Run as `python -m tests.conformance.child DIALECT [FLAGS]`; flags are the standard ones.
"""

from __future__ import annotations

import argparse
import sys

from smg_grpc_servicer.core import logs
from smg_grpc_servicer.core.health import StatusBoard
from smg_grpc_servicer.core.options import ServerOptions, server_settings
from smg_grpc_servicer.core.process import run
from smg_grpc_servicer.core.server import GrpcServer, Life
from smg_grpc_servicer.testing.dialects import DIALECTS
from smg_grpc_servicer.testing.servicers import servicer_for
from tests.conformance.servers import slow_engine


def main() -> int:
    settings = server_settings("test")
    parser = argparse.ArgumentParser()
    parser.add_argument("dialect", choices=tuple(DIALECTS))
    settings.add_to(parser)
    arguments = parser.parse_args()
    options = ServerOptions.from_values(settings.resolve(arguments))
    dialect = DIALECTS[arguments.dialect]
    logs.configure("info", "text")

    async def serve() -> int:
        engine, board = slow_engine(), StatusBoard()
        servicer = servicer_for(dialect, engine, board)
        server = GrpcServer(options, board)
        server.add(lambda on: dialect.registrar()(servicer, on), dialect.service)
        life = Life(start=engine.start, close=engine.close, cut=servicer.table.cut_all)
        return await server.serve(life, owns_process=True)

    return run(serve)


if __name__ == "__main__":
    sys.exit(main())
