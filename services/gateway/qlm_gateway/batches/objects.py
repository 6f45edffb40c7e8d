"""Named objects in a folder or in a bucket: the port between batches and where they lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Protocol

from qlm_core.vocabulary.errors import ConfigError

BUCKET_SCHEME = "s3://"
PIECE_BYTES = 1 << 20
"""Bytes that are copied at a time."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Stored:
    """An object's content. `version`: another one after each write."""

    content: bytes
    version: str


class ObjectChanged(Exception):
    """The object has another version than the caller read, or is gone."""


class ObjectWriter(Protocol):
    """A large object while it is written. It exists from `commit` on, whole."""

    def write(self, piece: bytes, /) -> object: ...

    def commit(self) -> None: ...

    def abort(self) -> None:
        """Drops the bytes; nothing after `commit`."""


class Objects(Protocol):
    """Objects by name: segments with `/` between them, none of which begins with a dot. Every call blocks, has a deadline, and raises
    OSError where the store cannot be used. Writes are whole or absent, durable, and seen by all gateways once they return."""

    def read(self, name: str) -> Stored:
        """A small object. Raises FileNotFoundError."""

    def open(self, name: str) -> BinaryIO:
        """Reads a large object piece by piece. Raises FileNotFoundError."""

    def write(self, name: str, content: bytes, version: str | None = None) -> None:
        """Writes a small object. `version`: the one to replace, else ObjectChanged; None: any or none."""

    def begin(self, name: str) -> ObjectWriter:
        """A large object, replaced by `commit`."""

    def names(self, folder: str) -> list[tuple[str, int]]:
        """Names of the objects below a folder, in the order of their code points, and their bytes."""

    def delete(self, name: str) -> None:
        """Also what `begin` left of it where its gateway was killed; nothing for an object that does not exist."""


def open_objects(place: str) -> Objects:
    """`place`: a folder, or s3://BUCKET/PREFIX. Raises ConfigError."""
    if not place.startswith(BUCKET_SCHEME):
        from qlm_gateway.batches.folder import FolderObjects

        return FolderObjects(Path(place))
    try:
        from qlm_gateway.batches.bucket import BucketObjects
    except ImportError as error:
        raise ConfigError("gateway.batches.folder: a bucket needs the package obstore: pip install 'qlm-serving[s3]'") from error
    return BucketObjects(place)
