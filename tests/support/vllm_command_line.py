"""A command line on the parsers of an installed vLLM, with our flags on them."""

from __future__ import annotations

from typing import Any

from smg_grpc_servicer.vllm import options, plugin

LINE = ["serve", "some-model", "--grpc", "--port", "8001", "--drain_seconds", "3", "--api-key", "k"]


def parsed() -> dict[str, Any]:
    """What became of our flags; `test_real_parser.py` has what is right."""
    import vllm
    from vllm.entrypoints.cli.serve import cmd_init
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    plugin.register()
    parser = FlexibleArgumentParser(description="vLLM CLI")
    commands = parser.add_subparsers(dest="subparser")
    (serve,) = (command.subparser_init(commands) for command in cmd_init())
    clashes = [s.flag for s in options.flags() if s.flag in serve._option_string_actions]
    http = parser.parse_args(["serve", "some-model"])
    first, again = parser.parse_args(LINE), parser.parse_args(LINE)
    asked = options.plan(first)
    bare = options.plan(parser.parse_args(["serve", "some-model", "--grpc"]))

    from vllm.entrypoints.launchers import grpc_server

    from smg_grpc_servicer.vllm.engine_life import Launcher

    ours: Any = grpc_server.serve_grpc
    return {
        "clashes": clashes,
        "http": [name for name in vars(http) if name.startswith(options.PREFIX)],
        "same": vars(first) == vars(again),
        "drain": asked.server.drain_seconds,
        "host": asked.server.host,
        "port": asked.server.port,
        "by default": f"{bare.server.host}:{bare.server.port}",
        "tokens": len(asked.server.auth_tokens),
        "ours": ours.__wrapped__ is not ours,
        "known": Launcher.of(ours.__wrapped__).version == vllm.__version__,
    }
