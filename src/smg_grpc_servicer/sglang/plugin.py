"""The entry point `sglang.srt.plugins: smg-servicer`: our flags and event loop on gRPC launches.

SGLang calls `register` in every process of its; both its commands do so before they parse (`sglang
serve --help` alone prints without plugins). It imports the standard library only. SGLang's parser
gets our flags, and what was given of them rides on the record that was parsed, as SGLang's own
`_launch_command` does: its fields are SGLang's. A launch that we will serve gets uvloop, where it
is installed: SGLang runs `serve_grpc` on whatever loop `asyncio.run` makes.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import multiprocessing
import os
import sys
from collections.abc import Mapping
from typing import Any

log = logging.getLogger(__name__)

HOOKS = "sglang.srt.plugins.hook_registry"
RECORD = "sglang.srt.server_args.ServerArgs"
TITLE = "smg-grpc-servicer"
"""Of our group in the help."""
LOOP_VARIABLE = "SMG_SERVICER_EVENT_LOOP"

_GIVEN = "_smg_servicer_flags"


def register() -> None:
    """See the module. Ranks parse nothing, and a process that SGLang did not call has no hooks."""
    hooks = sys.modules.get(HOOKS)
    if hooks is None or multiprocessing.parent_process() is not None:
        return
    after = hooks.HookType.AFTER
    hooks.HookRegistry.register(f"{RECORD}.add_cli_args", add_flags, after)
    hooks.HookRegistry.register(f"{RECORD}.from_cli_args", parsed, after)


def given(server_args: object) -> Mapping[str, object] | None:
    """Our flags as they were written, by setting; None when the parser had none of them."""
    found: Mapping[str, object] | None = getattr(server_args, _GIVEN, None)
    return found


def add_flags(_: object, parser: argparse.ArgumentParser) -> None:
    """After `add_cli_args`."""
    from smg_grpc_servicer.core.settings import Settings
    from smg_grpc_servicer.sglang import options

    group = parser.add_argument_group(TITLE, "With --smg-grpc-mode: the server of this package.")
    for setting in options.flags():
        # A flag SGLang has got meanwhile is SGLang's; argparse has no public way to ask.
        if setting.flag not in parser._option_string_actions:  # noqa: SLF001
            Settings(setting).add_to(group, prefix=options.PREFIX, default=argparse.SUPPRESS)


def parsed(server_args: Any, _: type, namespace: argparse.Namespace) -> None:
    """After `from_cli_args`. :raises SystemExit: flags of ours on a launch that we do not serve."""
    from smg_grpc_servicer.core.errors import ConfigError
    from smg_grpc_servicer.core.process import print_config_error
    from smg_grpc_servicer.sglang import options

    values = vars(namespace)
    flags = {
        setting.name: values[options.PREFIX + setting.name]
        for setting in options.flags()
        if options.PREFIX + setting.name in values
    }
    grpc = namespace.smg_grpc_mode or namespace.grpc_mode
    if grpc and not namespace.encoder_only:
        _use_uvloop()
    elif flags:
        written = ", ".join(str(s.flag) for s in options.flags() if s.name in flags)
        # Nobody shall think that, say, --auth-token-file guards another server.
        why = "has no effect with --encoder-only" if grpc else "works only with --smg-grpc-mode"
        print_config_error(ConfigError(f"{written}: {why}"))
        raise SystemExit(2)
    setattr(server_args, _GIVEN, flags)


def _use_uvloop() -> None:
    """SMG_SERVICER_EVENT_LOOP=asyncio keeps Python's own."""
    if os.environ.get(LOOP_VARIABLE, "").strip().lower() == "asyncio":
        return
    try:
        import uvloop
    except ImportError:
        log.debug("uvloop is not installed")
        return
    asyncio.set_event_loop_policy(uvloop.EventLoopPolicy())
