"""Puts our `serve_grpc(args)` in the place of the one in vLLM's gRPC launcher.

The launcher is entered in three ways (`vllm serve --grpc`, `python -m` of its module, `python -m`
of the older name, which from 0.30 on forwards to it), and all of them look `serve_grpc` up by name
after the launcher's module is complete. So it is replaced there, by whichever comes first:

- the parser hook of `plugin.py`, once a gRPC launch has been parsed;
- `announce`, which the servicer modules call when they are imported. The launcher imports them
  before it defines `serve_grpc`: its module is made to replace it when it is first asked for, and
  the parser hook is set, for people who left our plugin out of VLLM_PLUGINS.

`require` is for those who would rather not start than be served by the launcher's own server.
Standard library only: this is imported in every vLLM process. Nothing here is ever undone.
"""

from __future__ import annotations

import argparse
import functools
import importlib
import sys
from collections.abc import Awaitable, Callable, Iterator
from enum import Enum
from pathlib import PurePath
from types import FunctionType, ModuleType
from typing import Any

from smg_grpc_servicer.core.errors import ConfigError

LAUNCHERS = (
    "vllm.entrypoints.launchers.grpc_server",  # 0.30 and newer
    "vllm.entrypoints.grpc_server",  # 0.28 and 0.29; a forwarder since
)
_FILES = [PurePath(name.replace(".", "/") + ".py").parts for name in LAUNCHERS]
_NAME = "serve_grpc"

Serve = Callable[[argparse.Namespace], Awaitable[None]]

_ours: set[Any] = set()
_unimportable: dict[str, ImportError] = {}
"""Launchers that `install_in_new` could not import."""


class State(Enum):
    """How the switch and the launcher stand to each other."""

    BOUND = "bound"
    PENDING = "pending"
    """The launcher's module is still being imported; it is switched when it is asked."""
    SOURCE = "source"
    """It asks us in its own source."""
    UNKNOWN = "unknown"
    """It could not be imported for a reason that vLLM itself will tell."""
    MISSING = "missing"
    """Its module has no `serve_grpc`."""
    FOREIGN = "foreign"
    """Its `serve_grpc` is no function of its own: somebody else put another there."""
    ABSENT = "absent"
    """There is no such module."""


_REFUSED = {
    State.MISSING: "its gRPC launcher {0} defines no serve_grpc",
    State.FOREIGN: "serve_grpc of its gRPC launcher {0} was replaced by another package",
    State.ABSENT: "it has no gRPC launcher {0}",
}


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
        except ImportError as error:
            _unimportable[name] = error
            continue  # Another release's name, or vLLM will say what is missing.
        break
    install()


def state() -> tuple[State, str]:
    """How it stands once a gRPC launch is parsed, and with which launcher."""
    found = [(_state_of(module), module.__name__) for module in _loaded()]
    for each in State:
        for seen, name in found:
            if seen is each:
                return each, name
    for name, error in _unimportable.items():
        if not (isinstance(error, ModuleNotFoundError) and _is_or_holds(error.name, name)):
            return State.UNKNOWN, name
    return State.ABSENT, " or ".join(LAUNCHERS)


def require(what: str) -> None:
    """:raises ConfigError: `what` was asked for, and the launcher would run its own server."""
    now, name = state()
    if now in _REFUSED:
        raise ConfigError(
            f"{what}: the installed vLLM cannot be switched to it: {_REFUSED[now].format(name)}; "
            "allowed: vLLM 0.28 to 0.33"
        )


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


def _state_of(module: ModuleType) -> State:
    if _NAME not in vars(module):
        if _is_importing(module):
            return State.PENDING
        from smg_grpc_servicer.vllm.upstream import asks_itself

        asks = asks_itself(vars(module).get("__file__"))
        return State.SOURCE if asks else State.MISSING
    serve = vars(module)[_NAME]
    if not isinstance(serve, FunctionType):
        return State.FOREIGN
    return State.BOUND if serve in _ours else State.PENDING


def _is_importing(module: ModuleType) -> bool:
    # The import system's own mark; a name that is gone one day only makes the answer "missing".
    return bool(getattr(module.__spec__, "_initializing", False))


def _is_or_holds(missing: str | None, name: str) -> bool:
    return missing is not None and (name == missing or name.startswith(f"{missing}."))


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
