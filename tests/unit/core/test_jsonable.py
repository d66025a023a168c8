"""Whatever is in a configuration, JSON comes out."""

from __future__ import annotations

import argparse
import collections
import dataclasses
import datetime as dt
import enum
import json
import math
import pathlib
import types
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from smg_grpc_servicer.core.jsonable import MAX_DEPTH, MAX_VALUES, Json, jsonable


class Color(enum.Enum):
    RED = "red"
    PAIR = (1, 2)


class Level(enum.IntEnum):
    HIGH = 3


@dataclasses.dataclass
class Args:
    port: int
    inner: object = None


@dataclasses.dataclass
class Partial:
    known: int
    unset: int = dataclasses.field(init=False)


class Struct:
    """Looks like a msgspec structure."""

    __struct_fields__ = ("model", "missing")
    model = "m"


class Hostile:
    def __fspath__(self) -> str:
        raise RuntimeError("no")

    @property
    def __dict__(self) -> dict[str, object]:  # type: ignore[override]
        raise RuntimeError("no")


class Scalar:
    """Looks like a numpy scalar."""

    shape: tuple[int, ...] = ()

    def __init__(self, value: object) -> None:
        self._value = value

    def item(self) -> object:
        return self._value


Scalar.__module__ = "numpy"
Point = collections.namedtuple("Point", "x y")  # noqa: PYI024 - the untyped kind is the case here
NUMPY_DTYPE = type("Float32DType", (), {"__str__": lambda self: "float32"})


class Text(str):
    __slots__ = ()

    def __str__(self) -> str:
        raise RuntimeError("no")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (None, None), (True, True), (3, 3), (1.5, 1.5), ("x", "x"),
        (math.nan, None), (math.inf, None), (-math.inf, None),
        (10**400, 10**400), (1 << 5000, "int"),
        (Color.RED, "red"), (Color.PAIR, "PAIR"), (Level.HIGH, 3),
        (pathlib.PurePosixPath("/a/b"), "/a/b"), (Hostile(), "Hostile"),
        (b"abc", "abc"), (b"\xff\x00", "<2 bytes>"), (b"", ""), (bytearray(b"x"), "x"),
        ("\ud800", "?"), (Text("text"), "text"),
        ({3, 1, 2}, [1, 2, 3]), (frozenset({"b", "a"}), ["a", "b"]), ({1, "a"}, ["a", 1]),
        ((1, [2, (3,)]), [1, [2, [3]]]), (collections.deque([1]), [1]),
        ({1: 2, None: 3, "a": math.nan}, {"1": 2, "null": 3, "a": None}),
        ({(1, 2): 3, Color.RED: 4}, {"tuple": 3, "red": 4}),
        (Args(1, Args(2)), {"port": 1, "inner": {"port": 2, "inner": None}}),
        (Partial(1), {"known": 1}), (Struct(), {"model": "m"}), (Point(1, 2), {"x": 1, "y": 2}),
        (argparse.Namespace(a=1), {"a": 1}), (types.SimpleNamespace(b=2), {"b": 2}),
        (types.MappingProxyType({"a": 1}), {"a": 1}),
        (object(), "object"),
        (lambda: None, "function"), (Args, "Args"), ([].append, "builtin_function_or_method"),
        (iter([1]), "list_iterator"), (range(10**12), "range"),
        (Scalar(7), 7), (Scalar(math.inf), None), (NUMPY_DTYPE(), "float32"),
        (dt.date(2026, 1, 2), "2026-01-02"), (dt.timedelta(seconds=2), 2.0),
    ],
)  # fmt: skip
def test_values(value: object, expected: Json) -> None:
    assert jsonable(value) == expected
    assert type(jsonable(value)) is type(expected)


def test_arrays_are_named_not_written_out() -> None:
    array = Scalar(0)
    array.shape = (2, 3)
    assert jsonable(array) == "Scalar"


def test_real_numpy_scalars() -> None:
    numpy = pytest.importorskip("numpy")
    values = [numpy.int64(3), numpy.float32(0.5), numpy.bool_(True), numpy.str_("s")]
    assert jsonable(values) == [3, 0.5, True, "s"]
    assert jsonable([numpy.float16("nan"), numpy.zeros(3), numpy.dtype("float32")]) == [
        None,
        "ndarray",
        "float32",
    ]
    assert isinstance(jsonable(numpy.longdouble(1)), str)


def test_cycles_end_and_repeated_values_do_not_count_as_one() -> None:
    ring: list[Any] = [1]
    ring.append(ring)
    shared = {"a": 1}
    assert jsonable({"ring": ring, "x": shared, "y": shared}) == {
        "ring": [1, "<cycle>"],
        "x": shared,
        "y": shared,
    }


def test_depth_is_bounded() -> None:
    deep: Any = "end"
    for _ in range(10_000):
        deep = [deep]
    levels, found = 0, jsonable(deep)
    while isinstance(found, list):
        levels, found = levels + 1, found[0]
    assert (levels, found) == (MAX_DEPTH, "list")


def test_size_is_bounded_also_where_references_multiply() -> None:
    """Ten lists of ten references, sixteen deep: 10**16 values."""
    wide: Any = 0
    for _ in range(MAX_DEPTH):
        wide = [wide] * 10
    assert len(json.dumps(jsonable(wide))) < 50 * MAX_VALUES


def test_an_objects_address_never_shows() -> None:
    text = json.dumps(jsonable([object(), Hostile(), lambda: 0, test_values, threading_like()]))
    assert " at 0x" not in text
    assert "0x" not in text


def threading_like() -> object:
    return type("Lock", (), {})()


anything = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.binary(),
        st.text(st.characters()), st.complex_numbers(), st.dates(), st.timedeltas(),
        st.sampled_from([*Color, *Level, object(), Hostile(), Args, Struct()]),
        st.builds(pathlib.PurePosixPath, st.text(st.characters(exclude_characters="\0"))),
    ),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner), st.builds(Args, st.integers(), inner),
        st.dictionaries(st.one_of(st.text(), st.integers(), st.floats(), st.none()), inner),
        st.frozensets(st.one_of(st.text(), st.integers(), st.floats(), st.none())),
    ),
    max_leaves=20,
)  # fmt: skip


@given(anything)
def test_never_raises_is_json_utf8_and_stable(value: object) -> None:
    plain = jsonable(value)
    text = json.dumps(plain, allow_nan=False, ensure_ascii=False)
    text.encode("utf-8")
    assert json.loads(text) == plain
    assert jsonable(plain) == plain
