"""Parsers of setting values: text in, value out, `ValueError` otherwise.

Each says what it allows, once; `settings.py` puts that text into help and errors. A parser that
raises with a message of its own adds a reason (a file that does not exist).
"""

from __future__ import annotations

import math
import os
import re
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from smg_grpc_servicer.core import network

T_co = TypeVar("T_co", covariant=True)

_TRUE = frozenset({"1", "true", "yes", "on"})
_FALSE = frozenset({"0", "false", "no", "off"})
_SIZE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]i?)?B?", re.IGNORECASE)
_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_UNITS |= {"ki": 2**10, "mi": 2**20, "gi": 2**30, "ti": 2**40}


@dataclass(frozen=True, slots=True)
class Parser(Generic[T_co]):
    """How text becomes a value, what text is allowed, and how a value is written again."""

    parse: Callable[[str], T_co]
    allowed: str
    metavar: str
    show: Callable[[object], str] = str
    switch: bool = False
    """A boolean: its flag takes no value and has a `--no-` form."""
    service_link: bool = False
    """A port. Kubernetes puts `<SERVICE>_PORT=tcp://ADDRESS:PORT` into every pod's environment for
    each service around, so a variable of that form is nobody's choice."""
    many: bool = False
    """A list: its flag takes several words, its variable separates them with commas."""

    def __call__(self, text: str) -> T_co:
        return self.parse(text)


def _integer(low: int, high: int | None, allowed: str) -> Parser[int]:
    def parse(text: str) -> int:
        value = int(text.strip())
        if value < low or (high is not None and value > high):
            raise ValueError
        return value

    return Parser(parse, allowed, "N")


def _number(low_allowed: bool, allowed: str) -> Parser[float]:
    def parse(text: str) -> float:
        value = float(text.strip().removesuffix("s"))
        if not math.isfinite(value) or value < 0 or (value == 0 and not low_allowed):
            raise ValueError
        return value

    return Parser(parse, allowed, "SECONDS", show=lambda value: f"{value:g}")


def _boolean(text: str) -> bool:
    word = text.strip().lower()
    if word not in _TRUE | _FALSE:
        raise ValueError
    return word in _TRUE


def _size(low: int, high: int | None, allowed: str) -> Parser[int]:
    def parse(text: str) -> int:
        match = _SIZE.fullmatch(text.strip())
        if match is None:
            raise ValueError
        value = int(float(match[1]) * _UNITS[(match[2] or "").lower()])
        if value < low or (high is not None and value > high):
            raise ValueError
        return value

    return Parser(parse, allowed, "SIZE", show=show_bytes)


def show_bytes(value: object) -> str:
    """`536870912` as `512MiB`; sizes that are no whole unit stay plain numbers."""
    if isinstance(value, int):
        for unit, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
            if value >= size and value % size == 0:
                return f"{value // size}{unit}"
    return str(value)


def _path(text: str) -> Path:
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise ValueError("no such user's home") from None


def _file(text: str) -> Path:
    path = _path(text)
    try:
        # Not blocking: opening a FIFO would wait for somebody to write to it.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise ValueError(error.strerror or type(error).__name__) from None
    try:
        if not stat.S_ISREG(os.fstat(descriptor).st_mode):
            raise ValueError("a directory or device, not a regular file")
    finally:
        os.close(descriptor)
    return path


def _directory(text: str) -> Path:
    path = _path(text)
    if not path.is_dir():
        raise ValueError("no such directory")
    return path


def _text(text: str) -> str:
    if not text.strip():
        raise ValueError
    return text.strip()


INT32_MAX = 2**31 - 1
"""gRPC keeps its channel arguments in a C int."""

PORT = Parser(
    network.parse_port,
    "a port number from 0 (any free one) to 65535",
    "PORT",
    service_link=True,
)
HOST = Parser(network.parse_host, "an IPv4 or IPv6 address or a host name, without a port", "HOST")
POSITIVE_INT = _integer(1, None, "a whole number of at least 1")
POSITIVE_INT32 = _integer(1, INT32_MAX, f"a whole number from 1 to {INT32_MAX}")
COUNT = _integer(0, None, "a whole number of at least 0")
SECONDS = _number(True, "seconds, 0 or more")
POSITIVE_SECONDS = _number(False, "seconds, more than 0")
BYTES = _size(1, None, "a size in bytes such as 1048576, 512MiB or 2G")
BYTES_OR_ZERO = _size(0, None, "a size in bytes such as 1048576, 512MiB or 2G, or 0")
BYTES_INT32 = _size(
    1, INT32_MAX, f"a size in bytes such as 1048576 or 512MiB, of at most {INT32_MAX}"
)
BOOLEAN = Parser(
    _boolean,
    "1, true, yes, on or 0, false, no, off",
    "BOOL",
    show=lambda value: "on" if value else "off",
    switch=True,
)
FILE = Parser(_file, "the path of a file that can be read", "FILE")
DIRECTORY = Parser(_directory, "the path of a directory", "DIR")
TEXT = Parser(_text, "text that is not blank", "TEXT")


def one_of(*choices: str) -> Parser[str]:
    """One word of a list, in any case; the value is the word as listed."""

    def parse(text: str) -> str:
        word = text.strip().lower()
        if word not in choices:
            raise ValueError
        return word

    return Parser(parse, f"one of {', '.join(choices)}", f"{{{','.join(choices)}}}")


def list_of(item: Parser[T_co]) -> Parser[tuple[T_co, ...]]:
    """Several values: words after the flag, commas in a variable."""

    def parse(text: str) -> tuple[T_co, ...]:
        values = tuple(item(word.strip()) for word in text.split(",") if word.strip())
        if not values:
            raise ValueError
        return values

    def show(value: object) -> str:
        return ",".join(map(item.show, value)) if isinstance(value, tuple) else str(value)

    return Parser(parse, f"one or more of: {item.allowed}", item.metavar, show=show, many=True)
