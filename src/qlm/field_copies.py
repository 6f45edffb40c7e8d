"""Dataclasses and messages that name their fields alike: one made from the other, field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from google.protobuf.descriptor import Descriptor
from google.protobuf.message import Message

Made = TypeVar("Made")


def value_of(kind: Callable[..., Made], message: Message, /, **others: object) -> Made:
    """The dataclass `kind` with the message's fields of its names: repeated ones as tuples, optional ones that are absent as None.
    `others`: its fields that are not copied."""
    found = _fields(kind, message.DESCRIPTOR)
    return kind(**{name: _read(message, name, optional) for name, optional in found if name not in others}, **others)


def message_of(kind: Callable[..., Made], value: object, /, **others: object) -> Made:
    """The message `kind` with the fields of a dataclass. `others`: fields that are not copied."""
    copied: Any = type(value)
    return kind(**{name: getattr(value, name) for name in _names(copied) if name not in others}, **others)


def _read(message: Message, name: str, optional: bool) -> object:
    if optional and not message.HasField(name):
        return None
    found = getattr(message, name)
    return found if isinstance(found, (str, bytes, int, float)) else tuple(found)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))


@cache
def _fields(kind: Any, descriptor: Descriptor) -> tuple[tuple[str, bool], ...]:
    """Each name of a dataclass, and whether that field of the message may be absent."""
    known = descriptor.fields_by_name
    return tuple((name, name in known and known[name].has_presence) for name in _names(kind))
