"""The entry point `vllm.general_plugins: smg-servicer`: our flags on vLLM's gRPC launches.

vLLM calls `register` in every process of its, more than once; it imports the standard library
only. It hooks the class of vLLM's parsers: one that can launch gRPC (it defines `--grpc`, or is the
launcher's own) gets our flags the first time it parses, and a parsed gRPC launch gets our server
(`launcher_switch`). Values travel in the namespace, not through the environment; the one of
`--servicer-impl` is written there too, for the Python servicer to look at (`impl`).
"""

from __future__ import annotations

import argparse
import functools
import logging
import sys
from typing import TYPE_CHECKING, Any

from smg_grpc_servicer.core.errors import ConfigError
from smg_grpc_servicer.vllm import impl, launcher_switch

if TYPE_CHECKING:
    from smg_grpc_servicer.core.settings import Settings

log = logging.getLogger(__name__)

PARSERS = "vllm.utils.argparse_utils"
TITLE = "GrpcServer"
"""Of our group in the help, in the form of vLLM's own: `--help=GrpcServer` shows it."""

_OWN_PARSER = "vLLM gRPC Server"
"""The description of the parser in the launcher's `main`, which has no `--grpc`."""

_hooked: set[type] = set()


def register() -> None:
    """See the module. A process that has loaded no parser class needs nothing."""
    module = sys.modules.get(PARSERS)
    if module is not None:
        hook(module.FlexibleArgumentParser)


def hook(parsers: type[argparse.ArgumentParser]) -> None:
    """Make every parser of this class see to our flags; a second call changes nothing."""
    if parsers in _hooked:
        return
    _hooked.add(parsers)
    stock: Any = parsers.parse_known_args

    @functools.wraps(stock)
    def parse_known_args(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> Any:
        own = self.description == _OWN_PARSER
        if not own and not _defines(self, "--grpc"):
            return stock(self, *args, **kwargs)
        settings = _add_flags(self)
        namespace, rest = stock(self, *args, **kwargs)
        if own:
            launcher_switch.install()
            _require_switch(self, namespace)
        elif namespace.grpc:
            launcher_switch.install_in_new()
            _require_switch(self, namespace)
        elif settings is not None:
            _refuse_without_grpc(self, namespace, settings)
        return namespace, rest

    setattr(parsers, "parse_known_args", parse_known_args)  # noqa: B010 - mypy minds the other form


def _add_flags(parser: argparse.ArgumentParser) -> Settings | None:
    """Our flags, once a parser; None when what they need cannot be imported."""
    try:
        from smg_grpc_servicer.vllm import options
    except ImportError as error:
        # `vllm serve` without --grpc has to go on working.
        log.warning("no flags of smg-grpc-servicer: %s", error)
        return None
    settings = options.flags()
    group = next((g for g in parser._action_groups if g.title == TITLE), None)  # noqa: SLF001
    if group is None:
        group = parser.add_argument_group(TITLE, "With --grpc: the server of smg-grpc-servicer.")
        for setting in settings:
            # A flag vLLM has got meanwhile is vLLM's.
            if setting.flag is not None and not _defines(parser, setting.flag):
                only = type(settings)(setting)
                only.add_to(group, prefix=options.PREFIX, default=argparse.SUPPRESS)
    return settings


def _require_switch(parser: argparse.ArgumentParser, namespace: argparse.Namespace) -> None:
    """Who asked for the Rust servicer is not served by the launcher's own server instead."""
    try:
        if impl.resolve_servicer_impl(namespace) == impl.RUST:
            given = impl.flag_of(namespace) is not None
            launcher_switch.require(impl.FLAG if given else impl.VARIABLE)
    except ConfigError as error:
        parser.exit(2, f"error: {error}\n")


def _refuse_without_grpc(
    parser: argparse.ArgumentParser, namespace: argparse.Namespace, settings: Settings
) -> None:
    """Nobody shall think that, say, --auth-token-file guards the HTTP server."""
    from smg_grpc_servicer.vllm.options import PREFIX

    given = [s.flag for s in settings if s.flag is not None and PREFIX + s.name in vars(namespace)]
    if given:
        parser.error(f"{', '.join(given)}: works only with --grpc")


def _defines(parser: argparse.ArgumentParser, flag: str) -> bool:
    # argparse has no public way to ask; vLLM's own parser does the same.
    return flag in parser._option_string_actions  # noqa: SLF001
