"""Messages that are wrong somewhere: a good one, and odd values in a few of its fields.

`Mutants(good, odd, seed)` gives as many as are asked for. Odd values are those at the ends of a
field's type, and `odd` has more by the field's path; every field below the message has its turn,
alone and together with others.
"""

from __future__ import annotations

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

Field = Any

INTEGERS = (0, 1, 2, 7, 100, 2**31 - 1, -1, -(2**31), 2**32 - 1)
FLOATS = (
    0.0,
    0.5,
    1.0,
    2.0,
    -1.0,
    1e-45,
    1e-8,
    1e-30,
    3.4e38,
    -3.4e38,
    math.inf,
    -math.inf,
    math.nan,
)
TEXTS = ("", "a", " ", "\0", "\u00e9\u4e2d", "{", "-1", "x" * 300)
JSON: tuple[Any, ...] = (
    None,
    True,
    "",
    "a",
    1,
    -2.5,
    2.0**60,
    math.nan,
    math.inf,
    [1, [2, {"a": 3}]],
    {"a": {}},
)


class Mutants:
    """See the module."""

    def __init__(
        self,
        good: Any,
        odd: Mapping[str, Sequence[Any]],
        seed: int,
        *,
        alone: Sequence[str] = (),
    ) -> None:
        """`alone`: fields that are refused whatever is in them, which would hide the others."""
        self._good = good
        self._odd = odd
        self._dice = random.Random(seed)
        self._paths = list(_paths(good.DESCRIPTOR, ""))
        self._joined = [each for each in self._paths if each[0].split(".")[0] not in alone]

    def __iter__(self) -> Iterator[Any]:
        """First every field by itself, then some of them together, without end."""
        for path, field in self._paths:
            yield self._mutant([(path, field)])
        while True:
            yield self._mutant(self._dice.sample(self._joined, self._dice.randint(1, 4)))

    def bytes(self) -> Iterator[bytes]:
        """Serialized messages with a few bytes changed, cut off or put in, without end."""
        dice = self._dice
        while True:
            data = bytearray(self._mutant([]).SerializeToString())
            for _ in range(dice.randint(1, 3)):
                at = dice.randrange(len(data))
                data[at : at + dice.randint(0, 2)] = dice.randbytes(dice.randint(0, 3))
            yield bytes(data)

    def _mutant(self, changes: Sequence[tuple[str, Field]]) -> Any:
        message = type(self._good)()
        message.CopyFrom(self._good)
        for path, field in changes:
            target = message
            for name in path.split(".")[:-1]:
                target = getattr(target, name)
            self._put(target, path, field)
        return message

    def _put(self, target: Any, path: str, field: Field) -> None:
        name, dice = field.name, self._dice
        target.ClearField(name)
        if _is_map(field):
            key, value = (field.message_type.fields_by_name[part] for part in ("key", "value"))
            for _ in range(dice.randint(0, 3)):
                at = self._value(f"{path}.key", key)
                if value.message_type is None:
                    getattr(target, name)[at] = self._value(f"{path}.value", value)
                elif field.containing_type.full_name == "google.protobuf.Struct":
                    target[at] = dice.choice(JSON)
                else:
                    getattr(target, name)[at].SetInParent()
        elif field.message_type is not None:
            if field.is_repeated:
                for _ in range(dice.randint(0, 2)):
                    getattr(target, name).add()
            else:
                getattr(target, name).SetInParent()
        elif field.is_repeated:
            count = dice.choice((0, 1, 3, 40))
            getattr(target, name).extend(self._value(path, field) for _ in range(count))
        else:
            setattr(target, name, self._value(path, field))

    def _value(self, path: str, field: Field) -> Any:
        known = self._odd.get(path)
        if known and self._dice.random() < 0.8:
            return self._dice.choice(known)
        kind = field.cpp_type
        if kind in (field.CPPTYPE_FLOAT, field.CPPTYPE_DOUBLE):
            return self._dice.choice(FLOATS)
        if kind == field.CPPTYPE_BOOL:
            return self._dice.random() < 0.5
        if kind == field.CPPTYPE_STRING:
            text = self._dice.choice(TEXTS)
            return text.encode() if field.type == field.TYPE_BYTES else text
        unsigned = kind in (field.CPPTYPE_UINT32, field.CPPTYPE_UINT64)
        low, high = (0, 2**32 - 1) if unsigned else (-(2**31), 2**31 - 1)
        return self._dice.choice([number for number in INTEGERS if low <= number <= high])


def _is_map(field: Field) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def _paths(descriptor: Any, prefix: str) -> Iterator[tuple[str, Field]]:
    """Every field that can be set through singular messages above it."""
    for field in descriptor.fields:
        path = f"{prefix}{field.name}"
        yield path, field
        if field.message_type is not None and not field.is_repeated:
            yield from _paths(field.message_type, f"{path}.")


def names_a_field(details: str, descriptor: Any) -> bool:
    """Whether a refusal begins with the path of a field, indices and keys aside."""
    path, colon, _ = details.partition(": ")
    for name in path.split("."):
        field = descriptor.fields_by_name.get(name.partition("[")[0]) if descriptor else None
        if field is None:
            return False
        descriptor = field.message_type
    return bool(colon)
