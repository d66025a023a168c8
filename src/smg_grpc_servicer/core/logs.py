"""Log output of this package: one handler on its own logger, text or JSON lines.

Engines keep their loggers and handlers. Credentials that slip into a message are masked, control
characters in it escaped: what a client sends can neither forge a line nor move a cursor. A JSON
line has `ts` (RFC 3339, UTC), `level`, `logger`, `msg`, `exc` after an exception, and the fields
given as `extra`.
"""

from __future__ import annotations

import copy
import json
import logging
import re
import sys
from datetime import datetime, timezone
from typing import TYPE_CHECKING, TextIO

from smg_grpc_servicer.core.redaction import redact_text

PACKAGE = "smg_grpc_servicer"

# With the separators and direction marks that a terminal obeys like control characters.
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
_CONTROL_BUT_LINES = re.compile(r"(?!\n)" + _CONTROL.pattern)

_PLAIN = frozenset(logging.makeLogRecord({}).__dict__) | {"message", "asctime", "taskName"}


def configure(
    level: str = "info",
    style: str = "text",
    stream: TextIO | None = None,
    formatter: logging.Formatter | None = None,
) -> None:
    """Set up the package's logger; a second call replaces the first one's handler.

    An engine's `formatter` in place of a style gives lines of one form for both.
    """
    logger = logging.getLogger(PACKAGE)
    for old in list(logger.handlers):
        if isinstance(old, _Handler):
            logger.removeHandler(old)
    handler = _Handler(stream or sys.stderr)
    if formatter is not None:
        handler.setFormatter(BorrowedFormatter(formatter))
    else:
        handler.setFormatter(JsonFormatter() if style == "json" else TextFormatter())
    logger.addHandler(handler)
    logger.setLevel(level.upper())
    # Engines put handlers on the root logger; each line would appear twice.
    logger.propagate = False


def is_json() -> bool:
    """Whether `configure` has set up JSON lines."""
    handlers = logging.getLogger(PACKAGE).handlers
    return any(isinstance(handler.formatter, JsonFormatter) for handler in handlers)


if TYPE_CHECKING:
    StreamHandler = logging.StreamHandler[TextIO]
else:
    StreamHandler = logging.StreamHandler  # takes no type argument at run time before 3.11


class _Handler(StreamHandler):
    """Ours, to be told from handlers that others added."""


class TextFormatter(logging.Formatter):
    """`2026-01-31 12:00:00.123 INFO core.server: text`; a traceback follows on lines of its own."""

    default_msec_format = "%s.%03d"

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        return _CONTROL_BUT_LINES.sub(_escaped, redact_text(super().format(record)))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802 - logging's own name
        # Masked first: a credential is not recognised any more once a break in it is escaped.
        return _one_line(redact_text(super().formatMessage(record)))


class BorrowedFormatter(logging.Formatter):
    """Somebody else's lines, credentials masked and control characters in messages escaped."""

    def __init__(self, lender: logging.Formatter) -> None:
        super().__init__()
        self._lender = lender

    def format(self, record: logging.LogRecord) -> str:
        message = record.getMessage()
        clean = _one_line(redact_text(message))
        if clean != message:
            record = copy.copy(record)
            record.msg, record.args = clean, None
        return redact_text(self._lender.format(record))


class JsonFormatter(logging.Formatter):
    """One JSON object a line."""

    def format(self, record: logging.LogRecord) -> str:
        moment = datetime.fromtimestamp(record.created, timezone.utc)
        line: dict[str, object] = {
            "ts": moment.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "msg": redact_text(record.getMessage()),
        }
        if record.exc_info:
            line["exc"] = redact_text(self.formatException(record.exc_info))
        for name, value in vars(record).items():
            if name not in _PLAIN and name not in line:
                line[name] = redact_text(value) if isinstance(value, str) else value
        return json.dumps(line, default=_plain, ensure_ascii=False)


def _one_line(text: str) -> str:
    return _CONTROL.sub(_escaped, text)


def _escaped(match: re.Match[str]) -> str:
    return match[0].encode("unicode_escape").decode("ascii")


def _plain(value: object) -> str:
    return redact_text(str(value))
