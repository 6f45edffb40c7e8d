"""The answers of a batch, a line each in the order of their ends, written so that a driver that dies leaves whole lines."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

from qlm_gateway.batches.folder import BatchFolder
from qlm_gateway.batches.records import BatchRecord

OUTPUT, ERRORS = "output", "errors"


class Answers:
    """`done`: numbers of the lines that have an answer. All calls except `add` block."""

    def __init__(self, folder: BatchFolder, batch: BatchRecord) -> None:
        self._batch = batch
        self._paths = {kind: folder.answers(batch, kind) for kind in (OUTPUT, ERRORS)}
        numbers = {kind: set(_mended(path)) for kind, path in self._paths.items()}
        self.done = numbers[OUTPUT] | numbers[ERRORS]
        self.completed, self.failed = len(numbers[OUTPUT]), len(numbers[ERRORS] - numbers[OUTPUT])
        self._files: dict[str, BinaryIO] = {kind: path.open("ab") for kind, path in self._paths.items()}

    def add(self, number: int, custom_id: str, response: Mapping[str, Any] | None, error: Mapping[str, Any] | None) -> None:
        """The answer of a line; another one of the same line is ignored."""
        if number in self.done:
            return
        self.done.add(number)
        line = {
            "id": f"batch_req_{self._batch.id.removeprefix('batch-')}_{number}",
            "custom_id": custom_id,
            "response": response,
            "error": error,
        }
        kind = OUTPUT if error is None else ERRORS
        self._files[kind].write(json.dumps(line, ensure_ascii=False).encode() + b"\n")
        self.completed += error is None
        self.failed += error is not None

    def sync(self) -> None:
        """To the disk."""
        for file in self._files.values():
            file.flush()
            os.fsync(file.fileno())

    def close(self) -> None:
        for file in self._files.values():
            file.close()

    def whole(self, kind: str, target: Path) -> int:
        """Writes the answers of a kind to a file, each line once; returns its bytes."""
        seen: set[int] = set()
        with target.open("wb") as file:
            for number, line in _lines(self._paths[kind]):
                if number not in seen:
                    seen.add(number)
                    file.write(line)
            file.flush()
            os.fsync(file.fileno())
            return file.tell()


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Numbers and bytes of whole lines; stops at what is none."""
    with path.open("rb") as file:
        for line in file:
            try:
                number = int(json.loads(line)["id"].rpartition("_")[2]) if line.endswith(b"\n") else 0
            except (ValueError, KeyError, TypeError, AttributeError):
                return
            if number < 1:
                return
            yield number, line


def _mended(path: Path) -> list[int]:
    """The numbers of a file's lines; cuts off what a driver that died had not written whole."""
    path.touch()
    found, end = [], 0
    for number, line in _lines(path):
        found.append(number)
        end += len(line)
    os.truncate(path, end)
    return found
