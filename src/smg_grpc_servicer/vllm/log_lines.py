"""One log of two: our lines in the form and on the stream of vLLM's, at its level.

vLLM's handlers are its own logger's alone, so without this our lines would look unlike its, or not
be seen at all.
"""

from __future__ import annotations

import logging
import sys

from smg_grpc_servicer.core import logs
from smg_grpc_servicer.core.options import LOG_FORMAT, LOG_LEVEL
from smg_grpc_servicer.core.settings import Values


def settle(values: Values) -> None:
    """`configure`, as the settings of a launch say."""
    style = values.get_value(LOG_FORMAT)
    chosen = values.sources[LOG_FORMAT.name] != "default"
    configure(values.get_value(LOG_LEVEL), style if chosen else None)


def configure(level: str, style: str | None) -> None:
    """Set up our logger; `style` is the one an operator asked for, None for vLLM's form.

    Handlers that an operator's own logging configuration gave our logger are left alone.
    """
    ours = logging.getLogger(logs.PACKAGE)
    if ours.handlers and style is None:
        ours.setLevel(level.upper())
        return
    lines = [
        handler
        for handler in logging.getLogger("vllm").handlers
        if isinstance(handler, logging.StreamHandler) and handler.formatter is not None
    ]
    if style is not None or not lines:
        logs.configure(level, style or "text")
    else:
        logs.configure(level, stream=lines[0].stream or sys.stdout, formatter=lines[0].formatter)
