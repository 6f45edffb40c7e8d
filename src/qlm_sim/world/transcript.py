"""The transcript of a run: one line an event, with the time, the process and the machine's effects.

The words derive from the events and effects themselves, so that a new one of a service needs no change here.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import MISSING, fields, is_dataclass
from enum import Enum
from typing import Any

import numpy as np

ITEMS_SHOWN = 3
TEXT_SHOWN = 48


class Transcript:
    """`lines` keeps the last lines, `hashed` the `digest`; without both no line is made."""

    def __init__(self, start_s: float, *, lines_max: int = 0, hashed: bool = False) -> None:
        self.on = lines_max > 0 or hashed
        self.hashed = hashed
        self._start_s = start_s
        self._lines_max = lines_max
        self._lines: list[str] = []
        self._hash = hashlib.blake2b(digest_size=16) if hashed else None

    def line(self, now_s: float, process: str, text: str) -> None:
        """Adds a line; the oldest are dropped beyond the limit."""
        if not self.on:
            return
        line = f"{now_s - self._start_s:10.3f} {process:<14} {text}"
        if self._hash is not None:
            self._hash.update(line.encode() + b"\n")
        if self._lines_max:
            self._lines.append(line)
            if len(self._lines) > 2 * self._lines_max:
                del self._lines[: -self._lines_max]

    def step(self, now_s: float, process: str, event: object, effects: Sequence[object]) -> None:
        self.line(now_s, process, f"{in_words(event)} -> {', '.join(map(in_words, effects)) or 'nothing'}")

    @property
    def lines(self) -> tuple[str, ...]:
        return tuple(self._lines[-self._lines_max :])

    @property
    def digest(self) -> str:
        assert self._hash is not None, "a transcript that is not hashed has no digest"
        return self._hash.hexdigest()


def in_words(value: Any) -> str:
    """A value of the services, short: "pull model=m requests_max=8"."""
    if is_dataclass(value) and not isinstance(value, type):
        parts = [_spoken(type(value).__name__)]
        for each in fields(value):
            if not each.init:  # it follows from the others, or is a cache
                continue
            found = getattr(value, each.name)
            if not isinstance(found, np.ndarray) and (
                found is None or found == "" or found == () or (each.default is not MISSING and found == each.default)
            ):
                continue
            parts.append(f"{each.name}={_short(found, each.name)}")
        return " ".join(parts)
    return _short(value, "")


def _spoken(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", " ", name).lower()


def _short(value: Any, name: str) -> str:
    if isinstance(value, Enum):
        return str(value.value)
    if isinstance(value, float):
        # Times of the clock are omitted: they are on the line's left.
        return "soon" if value > 1e8 and value != float("inf") else f"{value:.3f}"
    if isinstance(value, bytes | bytearray):
        return f"{len(value)}B"
    if isinstance(value, str):
        return value if len(value) <= TEXT_SHOWN else value[:TEXT_SHOWN] + "..."
    if isinstance(value, Mapping):
        return _several([f"{_short(key, '')}:{_short(found, '')}" for key, found in value.items()])
    if isinstance(value, np.ndarray):
        # Numbers as identifiers; measures are equal in every run, but carry no information here.
        return _several([str(each) for each in value.ravel().tolist()]) if value.dtype.kind == "i" else f"{value.size} of an array"
    if isinstance(value, AbstractSet):
        return f"{len(value)} of a set"
    if isinstance(value, Sequence):
        return _several(
            [f"({in_words(each)})" if is_dataclass(each) else _short(each, "") for each in value[: ITEMS_SHOWN + 1]], len(value)
        )
    if is_dataclass(value):
        return f"({in_words(value)})"
    return str(value)


def _several(shown: list[str], count: int | None = None) -> str:
    count = len(shown) if count is None else count
    more = f" +{count - ITEMS_SHOWN}" if count > ITEMS_SHOWN else ""
    return "[" + " ".join(shown[:ITEMS_SHOWN]) + more + "]"
