"""The answers of a batch, a line each in the order of their ends, in parts: objects of whole lines. A driver writes parts of its own and
replaces its last one until that is large."""

from __future__ import annotations

import asyncio
import json
import secrets
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any

from qlm_gateway.batches.objects import Objects, ObjectWriter
from qlm_gateway.batches.records import BatchRecord
from qlm_gateway.batches.store import answers_of

OUTPUT, ERRORS = KINDS = ("output", "errors")
PART_BYTES = 256 << 10
"""From this size on a part is left as it is."""

UNSAVED_MAX = 4_096
"""Answers in memory that wait for a slow store, before no more lines are sent."""


class Answers:
    """`done`: numbers of the lines that have an answer. `room`: not set while UNSAVED_MAX answers or more wait for `save`; who calls that
    sets it. All calls except `add` block."""

    def __init__(self, objects: Objects, batch: BatchRecord) -> None:
        self._objects = objects
        self._batch = batch
        self._numbers = {kind: {number for part in self._parts(kind) for number, _ in part} for kind in KINDS}
        self._fresh = {kind: deque[bytes]() for kind in KINDS}
        self._last = {kind: (self._new_part(kind), bytearray()) for kind in KINDS}
        self.done = self._numbers[OUTPUT] | self._numbers[ERRORS]
        self.room = asyncio.Event()
        self.room.set()

    @property
    def completed(self) -> int:
        return len(self._numbers[OUTPUT])

    @property
    def failed(self) -> int:
        return len(self.done) - self.completed

    def add(self, number: int, custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> None:
        """The answer of a line; another one of the same line is ignored."""
        if number in self.done:
            return
        line = {
            "id": f"batch_req_{self._batch.id.removeprefix('batch-')}_{number}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        kind = OUTPUT if error is None else ERRORS
        self._fresh[kind].append(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self._numbers[kind].add(number)
        self.done.add(number)
        if sum(map(len, self._fresh.values())) >= UNSAVED_MAX:
            self.room.clear()

    def save(self) -> None:
        for kind, fresh in self._fresh.items():
            name, content = self._last[kind]
            if count := len(fresh):
                content += b"".join(fresh.popleft() for _ in range(count))
                self._objects.write(name, bytes(content))
                if len(content) >= PART_BYTES:
                    self._last[kind] = (self._new_part(kind), bytearray())

    def whole(self, kind: str, writer: ObjectWriter) -> int:
        """Writes the answers of a kind, each line once; returns their bytes. Raises OSError where some are gone."""
        size, seen = 0, set[int]() if kind == OUTPUT else set(self._numbers[OUTPUT])
        for part in self._parts(kind):
            for number, line in part:
                if number not in seen:
                    seen.add(number)
                    size += len(line)
                    writer.write(line)
        if not seen >= self._numbers[kind]:
            raise OSError("another driver deleted answers of the batch")
        return size

    def _new_part(self, kind: str) -> str:
        folder = f"{answers_of(self._batch)}/{kind}"
        return f"{folder}/{len(self._objects.names(folder)):06d}.{secrets.token_hex(4)}"

    def _parts(self, kind: str) -> Iterator[list[tuple[int, bytes]]]:
        for name, _ in self._objects.names(f"{answers_of(self._batch)}/{kind}"):
            yield list(_lines(self._objects.read(name).content))


def _lines(part: bytes) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of the lines that are answers. Requests of the others are sent again."""
    for line in part.splitlines(keepends=True):
        try:
            number = int(json.loads(line)["id"].rpartition("_")[2]) if line.endswith(b"\n") else 0
        except (ValueError, KeyError, TypeError, AttributeError):
            continue
        if number >= 1:
            yield number, line
