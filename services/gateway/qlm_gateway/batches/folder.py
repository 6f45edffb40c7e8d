"""Objects as files of a folder that all gateways mount."""

from __future__ import annotations

import errno
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

from qlm_gateway.batches.objects import ObjectChanged, Stored

CREATE_TRIES = 3


class FolderObjects:
    """Folders without objects are removed. A version is compared right before the write replaces it, not in one step with that."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def read(self, name: str) -> Stored:
        with (self._root / name).open("rb") as file:
            return Stored(content=file.read(), version=_version(os.fstat(file.fileno())))

    def open(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb")

    def write(self, name: str, content: bytes, version: str | None = None) -> None:
        path = self._root / name
        writer = FolderWriter(path)
        try:
            writer.write(content)
            if version is not None and not (path.exists() and _version(path.stat()) == version):
                raise ObjectChanged(name)
            writer.commit()
        finally:
            writer.abort()

    def begin(self, name: str) -> FolderWriter:
        return FolderWriter(self._root / name)

    def names(self, folder: str) -> list[tuple[str, int]]:
        found = []
        for path in (self._root / folder).rglob("*"):
            with suppress(FileNotFoundError):  # deleted meanwhile
                if not path.name.startswith(".") and path.is_file():
                    found.append((path.relative_to(self._root).as_posix(), path.stat().st_size))
        return sorted(found)

    def delete(self, name: str) -> None:
        path = self._root / name
        for left in path.parent.glob(f".{path.name}.*"):
            left.unlink(missing_ok=True)
        path.unlink(missing_ok=True)
        with suppress(OSError):  # until one that has others, too
            for folder in path.parents[: len(path.relative_to(self._root).parts) - 1]:
                folder.rmdir()


class FolderWriter:
    """Writes beside the object until `commit`."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._part = _fresh(path)
        self._file = _created(self._part)

    def write(self, piece: bytes, /) -> object:
        return self._file.write(piece)

    def commit(self) -> None:
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self._part, self._path)

    def abort(self) -> None:
        self._file.close()
        self._part.unlink(missing_ok=True)


def _fresh(path: Path) -> Path:
    return path.with_name(f".{path.name}.{secrets.token_hex(4)}")


def _created(path: Path) -> BinaryIO:
    """Opens a new file; its folders may be removed as empty meanwhile."""
    for _ in range(CREATE_TRIES):
        with suppress(FileNotFoundError):
            path.parent.mkdir(parents=True, exist_ok=True)
            return path.open("wb")
    raise FileNotFoundError(errno.ENOENT, "the folder is removed again and again", path.name)


def _version(stat: os.stat_result) -> str:
    return f"{stat.st_ino}.{stat.st_mtime_ns}"
