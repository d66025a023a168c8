"""The command line of every server of ours: parse, check everything, set up logs, run.

Exit codes are those of `core.process`; a setting that cannot work is told before anything is bound.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, NoReturn

from smg_grpc_servicer import __version__
from smg_grpc_servicer.core import logs, metrics_server
from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.core.options import EVENT_LOOP, LOG_FORMAT, LOG_LEVEL, ServerOptions
from smg_grpc_servicer.core.process import (
    flush,
    leave,
    open_standard_streams,
    print_config_error,
    run,
    write_error,
)
from smg_grpc_servicer.core.settings import Settings, Values

Serve = Callable[[Values, ServerOptions], Coroutine[Any, Any, int]]


def command(
    module: str,
    description: str,
    settings: Settings,
    serve: Serve,
    *,
    require: Callable[[], None] = lambda: None,
    argv: Sequence[str] | None = None,
) -> NoReturn:
    """Run `python -m module`. `require` raises ConfigError when the engine is not installed."""
    open_standard_streams()
    parser = _Parser(prog=f"python -m {module}", description=description)
    parser.add_argument("--version", action="version", version=__version__)
    settings.add_to(parser)
    args = parser.parse_args(argv)
    try:
        values = settings.resolve(args)
        logs.configure(values.get_value(LOG_LEVEL), values.get_value(LOG_FORMAT))
        options = ServerOptions.from_values(values)
        if options.metrics_port is not None:
            metrics_server.require_extra()
        require()
    except ConfigError as error:
        print_config_error(error)
        raise SystemExit(2) from None
    event_loop = values.get_value(EVENT_LOOP)
    # Past a closing interpreter: a native thread that lets go of a Python object while the
    # interpreter is finalised aborts the process (mlx 0.32 has such threads).
    leave(run(lambda: serve(values, options), event_loop=event_loop), flush)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line; the whole usage is what `--help` is for."""

    def error(self, message: str) -> NoReturn:
        flags = [flag for action in self._actions for flag in action.option_strings]
        words = (word.partition("=")[0].rstrip(":") for word in message.split())
        wrong = next((word for word in words if word.startswith("--")), "")
        near = difflib.get_close_matches(wrong, flags, 1, cutoff=0.7)
        hint = f"; did you mean {near[0]}?" if near and near[0] != wrong else "; see --help"
        write_error(f"error: {message}{hint}\n")
        self.exit(2)
