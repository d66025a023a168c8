"""Turns an engine's configuration into plain JSON values, whatever is in it.

Never raises, always ends, and what comes out passes `json.dumps(..., allow_nan=False)` and UTF-8.
Records (dataclasses, msgspec structs, pydantic models, namespaces, named tuples) become objects;
what is not a value becomes its type's name, never a `repr` (which may hold an address or a secret).
NaN and infinities become null. `jsonable(jsonable(x)) == jsonable(x)`.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime as dt
import enum
import json
import math
import os
import types
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import TypeAlias

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"

MAX_DEPTH = 16
"""A JSON level costs three levels of a protobuf Struct, and parsers stop at 100."""
MAX_VALUES = 100_000
MAX_INT_BITS = 4096
"""Python refuses to print integers that are much longer."""

_CYCLE = "<cycle>"
_NAMED_VALUES = frozenset({"dtype", "Dtype", "DType", "device", "Device"})
"""Types of torch, numpy and mlx whose text is the value: `torch.bfloat16`, `cuda:0`."""


def jsonable(value: object) -> Json:
    """`value` in JSON terms; a part that is too deep or unknown becomes its type's name.

    What is past `MAX_VALUES` is left out.
    """
    return _Walk().convert(value, 0)


def type_name(value: object) -> str:
    """The name of `value`'s type, without its module."""
    return _text(type(value).__name__)


class _Walk:
    """One conversion: which containers are open above the current value, how many are left."""

    def __init__(self) -> None:
        self._open: set[int] = set()
        self._left = MAX_VALUES

    def convert(self, value: object, depth: int) -> Json:
        self._left -= 1
        try:
            known, plain = _scalar(value)
            return plain if known else self._container(value, depth)
        except Exception:  # the object's own code failed while it was looked at
            return type_name(value)

    def _container(self, value: object, depth: int) -> Json:
        pairs = _pairs(value)
        values = _values(value) if pairs is None else None
        if pairs is None and values is None:
            return type_name(value)
        if id(value) in self._open:
            return _CYCLE
        if depth >= MAX_DEPTH:
            return type_name(value)
        self._open.add(id(value))
        try:
            if pairs is not None:
                return self._object(pairs, depth + 1)
            array = self._array(values or (), depth + 1)
            # A set has no order of its own: without one, equal values would differ in text.
            return sorted(array, key=json.dumps) if _is_set(value) else array
        finally:
            self._open.discard(id(value))

    def _object(self, pairs: Iterable[tuple[object, object]], depth: int) -> dict[str, Json]:
        result: dict[str, Json] = {}
        for key, value in pairs:
            if self._left <= 0:
                break
            result[_key(key)] = self.convert(value, depth)
        return result

    def _array(self, values: Iterable[object], depth: int) -> list[Json]:
        result: list[Json] = []
        for value in values:
            if self._left <= 0:
                break
            result.append(self.convert(value, depth))
        return result


def _scalar(value: object) -> tuple[bool, Json]:
    """Whether `value` is a single value, and its JSON form."""
    if value is None or isinstance(value, bool):
        return True, value
    if isinstance(value, enum.Enum):
        known, plain = _scalar(value.value)
        return True, plain if known else _text(value.name)
    if isinstance(value, str):
        return True, _text(value)
    if isinstance(value, int):
        number = int.__int__(value)
        return True, number if number.bit_length() <= MAX_INT_BITS else type_name(value)
    if isinstance(value, float):
        real = float.__float__(value)
        return True, real if math.isfinite(real) else None
    if isinstance(value, (bytes, bytearray, memoryview)):
        return True, _bytes(bytes(value))
    if isinstance(value, os.PathLike):
        path = os.fspath(value)
        return True, _text(path) if isinstance(path, str) else _bytes(path)
    if isinstance(value, (dt.date, dt.time)):
        return True, value.isoformat()
    if isinstance(value, dt.timedelta):
        return True, value.total_seconds()
    if isinstance(value, type):
        return True, _text(value.__name__)
    return _array_scalar(value)


def _array_scalar(value: object) -> tuple[bool, Json]:
    """Scalars and type objects of numpy and its like, told by their shape, without an import."""
    kind = type(value)
    if kind.__name__ in _NAMED_VALUES or kind.__name__.endswith("DType"):
        return True, _text(str(value))
    if kind.__module__.partition(".")[0] in ("numpy", "ml_dtypes") and hasattr(value, "item"):
        if getattr(value, "shape", None) != ():
            return True, type_name(value)
        item = value.item()
        # float128's item() is the value itself: look no deeper.
        return _scalar(item) if isinstance(item, (bool, int, float, str, bytes)) else (False, None)
    return False, None


def _pairs(value: object) -> Iterable[tuple[object, object]] | None:
    """The members of a mapping or a record."""
    if isinstance(value, Mapping):
        return value.items()
    kind = type(value)
    if dataclasses.is_dataclass(kind):
        return _members(value, [field.name for field in dataclasses.fields(kind)])
    for names in ("__struct_fields__", "_fields"):  # msgspec; named tuples
        fields = getattr(kind, names, None)
        if isinstance(fields, tuple) and (names != "_fields" or isinstance(value, tuple)):
            return _members(value, fields)
    model = getattr(kind, "model_fields", None)  # pydantic
    if isinstance(model, Mapping):
        return _members(value, list(model))
    if isinstance(value, (argparse.Namespace, types.SimpleNamespace)):
        return vars(value).items()
    return None


def _members(value: object, names: Iterable[str]) -> Iterator[tuple[str, object]]:
    for name in names:
        try:
            member = getattr(value, name)
        except AttributeError:  # declared but never set
            continue
        yield name, member


def _values(value: object) -> Iterable[object] | None:
    if isinstance(value, (list, tuple, deque)) or _is_set(value):
        return value  # type: ignore[return-value]
    return None


def _is_set(value: object) -> bool:
    return isinstance(value, (set, frozenset))


def _key(key: object) -> str:
    known, plain = _scalar(key)
    if not known:
        return type_name(key)
    return plain if isinstance(plain, str) else json.dumps(plain)


def _text(text: str) -> str:
    """`text` as a plain string that UTF-8 can carry."""
    plain = str.__str__(text)
    return plain if plain.isascii() else plain.encode("utf-8", "replace").decode("utf-8")


def _bytes(data: bytes) -> str:
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = ""
    return text if text.isprintable() and bool(text) == bool(data) else f"<{len(data)} bytes>"
