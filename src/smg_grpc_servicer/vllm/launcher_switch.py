"""Puts our `serve_grpc(args)` in the place of the one in vLLM's gRPC launcher.

The launcher is entered in three ways (`vllm serve --grpc`, `python -m` of its module, `python -m`
of the older name, which from 0.30 on forwards to it), and all of them look `serve_grpc` up by name
after the launcher's module is complete. So it is replaced there, by whichever comes first:

- the parser hook of `plugin.py`, once a gRPC launch has been parsed;
- `announce`, which the servicer modules call when they are imported. The launcher imports them
  before it defines `serve_grpc`: its module is made to replace it when it is first asked for, and
  the parser hook is set, for people who left our plugin out of VLLM_PLUGINS.

Standard library only: this is imported in every vLLM process. Nothing here is ever undone.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

LAUNCHERS = (
    "vllm.entrypoints.launchers.grpc_server",  # 0.30 and newer
    "vllm.entrypoints.grpc_server",  # 0.28 and 0.29; a forwarder since
)
_FILES = [PurePath(name.replace(".", "/") + ".py").parts for name in LAUNCHERS]
_NAME = "serve_grpc"

Serve = Callable[[argparse.Namespace], Awaitable[None]]

_ours: set[Any] = set()


def install() -> None:
    """Replace `serve_grpc` in every launcher module that is loaded and complete."""
    for module in _loaded():
        stock = vars(module).get(_NAME)
        if isinstance(stock, FunctionType) and stock not in _ours:
            # Past the property below; this is also where the launcher's `main` looks.
            vars(module)[_NAME] = _over(stock)
            if isinstance(module, _Launcher):
                module.__class__ = ModuleType  # type: ignore[assignment] # what it was


def install_in_new() -> None:
    """`install`, after loading the launcher: for `vllm serve`, which is about to do so."""
    for name in LAUNCHERS:
        try:
            importlib.import_module(name)
        except ImportError:
            continue  # Another release's name, or vLLM will say what is missing.
        break
    install()


def announce() -> None:
    """A launcher may be importing us: see the module."""
    for module in _loaded():
        if _NAME in vars(module):
            continue
        if module.__name__ != "__main__":
            module.__class__ = _Launcher
        from smg_grpc_servicer.vllm import plugin

        # It imports its parser class right after us.
        importlib.import_module(plugin.PARSERS)
        plugin.register()


class _Launcher(ModuleType):
    """A launcher's module until somebody takes `serve_grpc` from it."""

    @property
    def serve_grpc(self) -> Serve:
        # A property of the class wins over the module's dictionary.
        if _NAME not in vars(self):
            raise AttributeError(f"module {self.__name__!r} has no attribute {_NAME!r}")
        install()
        serve: Serve = vars(self)[_NAME]
        return serve


def _over(stock: FunctionType) -> Serve:
    @functools.wraps(stock)
    async def serve_grpc(args: argparse.Namespace) -> None:
        from smg_grpc_servicer.vllm import launch

        await launch.serve_grpc(args, stock)

    _ours.add(serve_grpc)
    return serve_grpc


def _loaded() -> Iterator[ModuleType]:
    """Launcher modules of this process, complete or not."""
    for name in LAUNCHERS:
        if (module := sys.modules.get(name)) is not None:
            yield module
    main = sys.modules.get("__main__")
    if main is not None and _is_launcher(main):
        yield main


def _is_launcher(main: ModuleType) -> bool:
    """Whether the launcher is run as the program: by `python -m`, or by the path of its file."""
    if main.__spec__ is not None:
        return main.__spec__.name in LAUNCHERS
    parts = PurePath(vars(main).get("__file__") or "").parts
    return any(parts[-len(file) :] == file for file in _FILES)
