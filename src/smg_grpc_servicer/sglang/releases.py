"""The SGLang releases this wing works with, and how one that it does not is told.

What counts is what we use, not the version: a release that lacks a name of `NEEDED`, or has it with
other arguments, is refused with one line; a newer one that has them all is served.
"""

from __future__ import annotations

import importlib
import inspect
import logging
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from smg_grpc_servicer.core.errors import ConfigError

log = logging.getLogger(__name__)

TRIED = ("0.5.20", "0.5.23")
"""The oldest and the newest release that all tests of this wing have run on."""


@dataclass(frozen=True, slots=True)
class Needed:
    """A name of SGLang's, and arguments it has to take."""

    module: str
    name: str
    arguments: tuple[str, ...] = ()

    def missing(self) -> str | None:
        """What is not as we know it, or None."""
        try:
            found = importlib.import_module(self.module)
            for part in self.name.split("."):
                found = getattr(found, part)
        except (ImportError, AttributeError) as error:
            return f"{type(error).__name__}: {error}"
        if not self.arguments:
            return None
        try:
            taken = inspect.signature(found).parameters  # type: ignore[arg-type]
        except (TypeError, ValueError) as error:
            return f"{self.name}: {error}"
        lacks = [name for name in self.arguments if name not in taken]
        return f"{self.name} takes no {', '.join(lacks)}" if lacks else None


NEEDED = (
    # Resolution that leaves the operator's record alone, new in 0.5.20; all else stands on it.
    Needed("sglang.srt.arg_groups.model_override_base", "resolving_view", ("server_args",)),
    Needed("sglang.srt.arg_groups.overrides", "declare_resolution", ("server_args", "source")),
    Needed("sglang.srt.server_args", "ServerArgs.resolve_once"),
    Needed("sglang.srt.server_args", "ServerArgs.resolved_dict"),
    Needed("sglang.srt.runtime_context", "get_parallel"),
    Needed("sglang.srt.managers.io_struct", "ShutdownReq"),
    Needed(
        "sglang.srt.managers.load_snapshot", "create_load_snapshot_reader", ("port_args", "caller")
    ),
)
LAUNCHER = (
    Needed(
        "sglang.srt.entrypoints.engine",
        "Engine._launch_subprocesses",
        (
            "server_args",
            "init_tokenizer_manager_func",
            "run_scheduler_process_func",
            "run_detokenizer_process_func",
        ),
    ),
    Needed(
        "sglang.srt.entrypoints.engine",
        "Engine._launch_scheduler_processes",
        ("server_args", "port_args", "run_scheduler_process_func"),
    ),
    Needed(
        "sglang.srt.entrypoints.engine",
        "Engine._launch_detokenizer_subprocesses",
        ("server_args", "port_args"),
    ),
    Needed("sglang.srt.managers.scheduler", "run_scheduler_process", ("pipe_writer",)),
    Needed("sglang.srt.managers.disagg_service", "start_disagg_service"),
)
"""Checked apart, because importing them takes seconds."""


def require(needed: tuple[Needed, ...] = NEEDED) -> None:
    """:raises ConfigError: this SGLang is none that we know."""
    for each in needed:
        missing = each.missing()
        if missing is not None:
            raise ConfigError(
                f"SGLang {installed() or '(unknown version)'} is not known here ({missing}); "
                f"allowed: {TRIED[0]} to {TRIED[1]}"
            )


def installed() -> str | None:
    """SGLang's version."""
    try:
        return version("sglang")
    except PackageNotFoundError:
        return None


def warn_if_new() -> None:
    """Say so when this is a release nobody has tried."""
    found = installed()
    if found is not None and _numbers(found) > _numbers(TRIED[1]):
        log.warning("SGLang %s is newer than what was tried (%s to %s)", found, *TRIED)


def _numbers(text: str) -> tuple[int, ...]:
    """`0.5.23.post1` as numbers; what is none counts for nothing."""
    return tuple(int(part) for part in text.split(".") if part.isdigit())
