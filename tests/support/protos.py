"""Walking protobuf descriptors: every field of a message by its path, and a value for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor

Message = Any


def covered(path: str, table: Mapping[str, Any]) -> bool:
    """Whether the path or something it lies in stands in the table."""
    parts = path.split(".")
    return any(".".join(parts[:end]) in table for end in range(1, len(parts) + 1))


def is_map(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.GetOptions().map_entry


def is_well_known(field: FieldDescriptor) -> bool:
    return field.message_type is not None and field.message_type.full_name.startswith("google.")


def fields(
    message: Descriptor, path: str = "", *tables: Mapping[str, Any]
) -> Iterator[tuple[str, FieldDescriptor]]:
    """The leaves below a message; what a table names is one, with all that lies in it."""
    for field in message.fields:
        where = f"{path or message.name}.{field.name}"
        named = any(where in table for table in tables)
        if field.message_type is None or named or is_map(field) or is_well_known(field):
            yield where, field
        else:
            yield from fields(field.message_type, where, *tables)


def parent_of(message: Message, path: str) -> tuple[Message, FieldDescriptor]:
    """The message that holds the field at `path` (which starts with the root's name)."""
    *between, name = path.split(".")[1:]
    for step in between:
        message = getattr(message, step)
    return message, message.DESCRIPTOR.fields_by_name[name]


def put(message: Message, path: str, value: Any = None) -> None:
    """Set a field to `value`, or to one that is not its default."""
    parent, field = parent_of(message, path)
    target = getattr(parent, field.name)
    if is_map(field) and field.message_type is not None:
        key, item = (field.message_type.fields_by_name[name] for name in ("key", "value"))
        if item.message_type is None:
            target[_sample(key)] = _sample(item)
        else:
            fill(target[_sample(key)])
    elif field.is_repeated:
        if field.message_type is None:
            target.append(_sample(field) if value is None else value)
        else:
            fill(target.add())
    elif field.message_type is not None:
        fill(target)
    else:
        setattr(parent, field.name, _sample(field) if value is None else value)


def fill(message: Message) -> None:
    """Make a message say something: its first field that is no message."""
    if message.DESCRIPTOR.full_name == "google.protobuf.Struct":
        message["key"] = 1
        return
    for field in message.DESCRIPTOR.fields:
        if field.message_type is None or field is message.DESCRIPTOR.fields[-1]:
            put(message, f"{message.DESCRIPTOR.name}.{field.name}")
            return


def _sample(field: FieldDescriptor) -> Any:
    samples = {
        field.CPPTYPE_STRING: b"7" if field.type == field.TYPE_BYTES else "7",
        field.CPPTYPE_BOOL: True,
        field.CPPTYPE_FLOAT: 0.5,
        field.CPPTYPE_DOUBLE: 0.5,
        field.CPPTYPE_ENUM: 1,
    }
    return samples.get(field.cpp_type, 2)


def said(message: Message, path: str = "") -> Iterator[str]:
    """The paths of all leaves that a message carries a value for, each as often as it does."""
    path = path or message.DESCRIPTOR.name
    for field, value in message.ListFields():
        where = f"{path}.{field.name}"
        if field.message_type is None or is_map(field) or is_well_known(field):
            yield where
        elif field.is_repeated:
            for item in value:
                yield from said(item, where)
        else:
            yield from said(value, where)
