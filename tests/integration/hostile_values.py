"""Hostile requests for any RPC, made from its descriptor: every field of a good message at its extremes, and bytes that are no message."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass

LONG_TEXT = "x" * 100_000
MANY = 20_000
RANDOM_MESSAGES = 12
SEED = 7

_NUMBERS: tuple[Any, ...] = (float("nan"), float("inf"), -float("inf"), -1.0, -0.0, 0.0, 5e-324, 1e-9, 1e308, -1e308)
_TEXTS = ("", LONG_TEXT, "\x00", "a\nb", " ", "\u202e\U0001f600", "{a}:b%3A*?[", "é" * 40, "\ufffd")
_F = FieldDescriptor
_INTEGERS = {
    _F.TYPE_INT32: (-1, -(1 << 31), (1 << 31) - 1),
    _F.TYPE_INT64: (-1, -(1 << 63), (1 << 63) - 1),
    _F.TYPE_UINT32: (0, 1, (1 << 32) - 1),
    _F.TYPE_UINT64: (0, 1, (1 << 64) - 1),
    _F.TYPE_FIXED32: (0, (1 << 32) - 1),
    _F.TYPE_ENUM: (0, 1, 2, 3, 99, -1, (1 << 31) - 1),
    _F.TYPE_BOOL: (False, True),
    _F.TYPE_DOUBLE: _NUMBERS,
    _F.TYPE_FLOAT: _NUMBERS,
    _F.TYPE_STRING: _TEXTS,
}


@dataclass(frozen=True)
class Hostile:
    """Bytes to send, and what they are."""

    what: str
    payload: bytes


def hostile_requests(good: Message) -> Iterator[Hostile]:
    """All of them, from a message that would be answered well."""
    yield from _with_fields(good, good, good.DESCRIPTOR, ())
    yield from _no_messages(good)


def _with_fields(good: Message, at: Message, descriptor: Any, path: tuple[str, ...]) -> Iterator[Hostile]:
    """`at`: the part of `good` that is changed; it is put back after each value."""
    for field in descriptor.fields:
        here = (*path, field.name)
        saved = type(at)()
        saved.CopyFrom(at)
        for what, change in _changes(field):
            at.CopyFrom(saved)
            change(at)
            yield Hostile(f"{'.'.join(here)} = {what}", good.SerializeToString())
        at.CopyFrom(saved)
        if field.message_type is not None and not _is_repeated(field):
            part = getattr(at, field.name)
            part.SetInParent()
            yield from _with_fields(good, part, field.message_type, here)
        elif field.message_type is not None:
            part = getattr(at, field.name).add()
            yield from _with_fields(good, part, field.message_type, here)
        at.CopyFrom(saved)
        if field.type == _F.TYPE_STRING:
            # Appended to the serialized message, a field wins over the one before.
            yield Hostile(f"{'.'.join(here)} = bad UTF-8", _appended(good, path, _tag(field.number, 2) + b"\x02\xff\xfe"))
        yield Hostile(f"{'.'.join(here)}: another wire type", _appended(good, path, _tag(field.number, 5) + b"\xff\xff\xff\xff"))


def _changes(field: FieldDescriptor) -> Iterator[tuple[str, Any]]:
    name = field.name
    yield "absent", lambda message: message.ClearField(name)
    if field.message_type is not None:
        if _is_repeated(field):
            yield "many", lambda message: getattr(message, name).extend(GetMessageClass(field.message_type)() for _ in range(MANY))
        else:
            yield "empty", lambda message: (message.ClearField(name), getattr(message, name).SetInParent())
        return
    for value in _INTEGERS[field.type]:
        shown = f"{value[:12]!r} ({len(value)})" if isinstance(value, str) else repr(value)
        if _is_repeated(field):
            yield f"one {shown}", lambda message, value=value: (message.ClearField(name), getattr(message, name).append(value))
            if not (isinstance(value, str) and len(value) > 100):
                yield f"many {shown}", lambda message, value=value: getattr(message, name).extend([value] * MANY)
        else:
            yield shown, lambda message, value=value: setattr(message, name, value)


def _is_repeated(field: FieldDescriptor) -> bool:
    return bool(field.is_repeated)


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*encoded, value])


def _tag(number: int, wire_type: int) -> bytes:
    return _varint(number << 3 | wire_type)


def _appended(good: Message, path: tuple[str, ...], raw: bytes) -> bytes:
    descriptor: Any = good.DESCRIPTOR
    numbers: list[int] = []
    for name in path:
        field = descriptor.fields_by_name[name]
        numbers.append(field.number)
        descriptor = field.message_type
    for number in reversed(numbers):
        raw = _tag(number, 2) + _varint(len(raw)) + raw
    return good.SerializeToString() + raw


def _no_messages(good: Message) -> Iterator[Hostile]:
    payload = good.SerializeToString()
    yield Hostile("nothing", b"")
    yield Hostile("unknown field", payload + _tag(5000, 2) + b"\x03abc")
    yield Hostile("cut off", payload[:-1])
    yield Hostile("a length beyond the end", payload + _tag(1, 2) + b"\xff\xff\xff\xff\x0f")
    yield Hostile("an endless varint", payload + b"\xff" * 12)
    yield Hostile("a group that does not end", payload + _tag(1, 3) * 200)
    yield Hostile("more than the largest message", _tag(5000, 2) + _varint(9 << 20) + bytes(9 << 20))
    source = random.Random(SEED)
    for index in range(RANDOM_MESSAGES):
        yield Hostile(f"random bytes {index}", source.randbytes(source.randint(1, 60)))
