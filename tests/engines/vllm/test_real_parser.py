"""Our flags on the parsers of an installed vLLM, and its launcher with ours in its place."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

# Importing vLLM alone takes 10 to 60 s.
pytestmark = [
    pytest.mark.timeout(240),
]

_PARSE = """
import json, sys
from vllm.entrypoints.cli.serve import cmd_init
from vllm.utils.argparse_utils import FlexibleArgumentParser
from smg_grpc_servicer.vllm import options, plugin

plugin.register()
parser = FlexibleArgumentParser(description="vLLM CLI")
commands = parser.add_subparsers(dest="subparser")
(serve,) = (command.subparser_init(commands) for command in cmd_init())
lacking = [s.flag for s in options.flags() if s.flag in serve._option_string_actions]
http = parser.parse_args(["serve", "some-model"])
line = ["serve", "some-model", "--grpc", "--port", "8001", "--drain_seconds", "3", "--api-key", "k"]
first, again = parser.parse_args(line), parser.parse_args(line)
asked = options.plan(first)

from vllm.entrypoints.launchers import grpc_server
from smg_grpc_servicer.vllm.engine_life import Launcher

ours = grpc_server.serve_grpc
print("RESULT " + json.dumps({
    "clashes": lacking,
    "http": [name for name in vars(http) if name.startswith(options.PREFIX)],
    "same": vars(first) == vars(again),
    "drain": asked.server.drain_seconds,
    "host": asked.server.host,
    "port": asked.server.port,
    "tokens": len(asked.server.auth_tokens),
    "ours": ours.__wrapped__ is not ours,
    "known": Launcher.of(ours.__wrapped__).version == __import__("vllm").__version__,
}))
"""


def test_a_real_command_line_parses_to_our_options() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _PARSE], capture_output=True, text=True, check=False, timeout=230
    )
    assert done.returncode == 0, done.stderr[-3000:]
    line = next(line for line in done.stdout.splitlines() if line.startswith("RESULT "))
    assert json.loads(line.removeprefix("RESULT ")) == {
        "clashes": [],
        "http": [],
        "same": True,
        "drain": 3.0,
        "host": "0.0.0.0",
        "port": 8001,
        "tokens": 1,
        "ours": True,
        "known": True,
    }
