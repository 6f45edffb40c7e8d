"""Objects in a bucket of an S3-compatible store. Region, endpoint and credentials are those of the environment (AWS_REGION,
AWS_ENDPOINT_URL, AWS_ACCESS_KEY_ID, ...), of a web identity, or of the instance."""

from __future__ import annotations

import errno
import io
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import BinaryIO

import obstore
from obstore.exceptions import BaseError, PreconditionError
from obstore.store import S3Store

from qlm_core.vocabulary.errors import ConfigError
from qlm_gateway.batches.objects import ObjectChanged, Stored

CONNECT_TIMEOUT_S, CALL_TIMEOUT_S, UPLOAD_TIMEOUT_S = 5, 20, 120
"""Deadlines of a connection, of one HTTP call with its body, and of one in a multipart upload, whose end makes the store copy the parts."""
RETRIES_MAX, RETRY_FOR_S = 4, 60
READ_BYTES = 4 << 20
"""Bytes of a large object that one call reads."""
UPLOAD_PART_BYTES, UPLOADS_AT_ONCE = 8 << 20, 2
"""Memory of a large object that is written: at most one part more than these."""
ERROR_CODE = re.compile(r"<Code>(\w{1,64})</Code>")


class BucketObjects:
    """`url`: s3://BUCKET/PREFIX. The store has strongly consistent reads and lists, multipart uploads and If-Match. Multipart uploads of
    a gateway that was killed stay until a lifecycle rule of the bucket aborts them. Raises ConfigError."""

    def __init__(self, url: str) -> None:
        self._store = _client(url, CALL_TIMEOUT_S)
        self._uploads = _client(url, UPLOAD_TIMEOUT_S)

    def read(self, name: str) -> Stored:
        with _errors():
            result = obstore.get(self._store, name)
            return Stored(content=bytes(result.bytes()), version=str(result.meta["e_tag"]))

    def open(self, name: str) -> BinaryIO:
        with _errors():
            size = obstore.head(self._store, name)["size"]
        return io.BufferedReader(_BucketReader(self._store, name, size), READ_BYTES)

    def write(self, name: str, content: bytes, version: str | None = None) -> None:
        with _errors():
            if version is None:
                obstore.put(self._store, name, content, use_multipart=False)
                return
            try:
                obstore.put(self._store, name, content, mode={"e_tag": version}, use_multipart=False)
            except PreconditionError:  # Ceph compares If-Match without the quotes that RFC 9110 asks for
                obstore.put(self._store, name, content, mode={"e_tag": version.strip('"')}, use_multipart=False)

    def begin(self, name: str) -> BucketWriter:
        return BucketWriter(self._uploads, name)

    def names(self, folder: str) -> list[tuple[str, int]]:
        with _errors():
            return sorted((meta["path"], meta["size"]) for page in obstore.list(self._store, folder, chunk_size=1_000) for meta in page)

    def delete(self, name: str) -> None:
        with _errors():
            obstore.delete(self._store, name)


def _client(url: str, timeout_s: float) -> S3Store:
    endpoint = os.environ.get("AWS_ENDPOINT_URL") or os.environ.get("AWS_ENDPOINT") or ""
    try:
        return S3Store.from_url(
            url,
            client_options={
                "connect_timeout": timedelta(seconds=CONNECT_TIMEOUT_S),
                "timeout": timedelta(seconds=timeout_s),
                "allow_http": endpoint.startswith("http://"),
            },
            retry_config={"max_retries": RETRIES_MAX, "retry_timeout": timedelta(seconds=RETRY_FOR_S)},
        )
    except BaseError as error:
        raise ConfigError(f"gateway.batches.folder: {url!r}: must be s3://BUCKET/PREFIX") from error


class BucketWriter:
    """Sends parts while it is written."""

    def __init__(self, store: S3Store, name: str) -> None:
        self._store = store
        self._name = name
        self._size = 0
        self._writer = obstore.open_writer(store, name, buffer_size=UPLOAD_PART_BYTES, max_concurrency=UPLOADS_AT_ONCE)

    def write(self, piece: bytes, /) -> object:
        self._size += len(piece)
        with _errors():
            return self._writer.write(piece)

    def commit(self) -> None:
        try:
            with _errors():
                self._writer.close()
        except OSError:  # the end of a long upload may take longer than a call, whose retry then finds no upload
            with _errors():
                if obstore.head(self._store, self._name)["size"] != self._size:
                    raise

    def abort(self) -> None:
        if not self._writer.closed():
            with suppress(OSError), _errors():  # the bucket's lifecycle rule aborts it then
                self._writer.__exit__(OSError, OSError(), None)


class _BucketReader(io.RawIOBase):
    """Reads an object by ranges, each of which is a call of its own with a deadline and retries."""

    def __init__(self, store: S3Store, name: str, size: int) -> None:
        self._store = store
        self._name = name
        self._size = size
        self._at = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        count = min(len(buffer), self._size - self._at)
        if count > 0:
            with _errors():
                buffer[:count] = bytes(obstore.get_range(self._store, self._name, start=self._at, length=count))
            self._at += count
        return count


@contextmanager
def _errors() -> Iterator[None]:
    """Turns the library's errors, whose texts hold the whole call, into OSError with the store's own code."""
    try:
        yield
    except FileNotFoundError as error:
        if _code_of(error) != "NoSuchBucket":
            raise FileNotFoundError(errno.ENOENT, "no such object in the bucket") from None
        raise OSError(errno.EIO, "the bucket does not exist") from None
    except PreconditionError:
        raise ObjectChanged from None
    except (BaseError, OSError) as error:
        raise OSError(errno.EIO, f"the bucket does not answer as it should: {_code_of(error) or type(error).__name__}") from None


def _code_of(error: Exception) -> str:
    found = ERROR_CODE.search(str(error))
    return "" if found is None else found[1]
