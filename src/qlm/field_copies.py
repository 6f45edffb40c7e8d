"""Dataclasses and messages that name their fields alike: one made from the other, field by field."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import cache
from typing import Any, TypeVar

from google.protobuf.message import Message

Made = TypeVar("Made")


def value_of(kind: Callable[..., Made], message: Message, **others: object) -> Made:
    """The dataclass `kind` with the message's fields of its names: repeated ones as tuples, optional ones that are absent as None.
    `others`: its fields that are not copied."""
    return kind(**{name: _field(message, name) for name in _names(kind) if name not in others}, **others)


def message_of(kind: Callable[..., Made], value: object, **others: object) -> Made:
    """The message `kind` with the fields of a dataclass. `others`: fields that are not copied."""
    return kind(**{name: getattr(value, name) for name in _names(type(value)) if name not in others}, **others)


def _field(message: Message, name: str) -> object:
    if message.DESCRIPTOR.fields_by_name[name].has_presence and not message.HasField(name):
        return None
    found = getattr(message, name)
    return found if isinstance(found, (str, bytes, int, float)) else tuple(found)


@cache
def _names(kind: Any) -> tuple[str, ...]:
    return tuple(field.name for field in fields(kind))
