"""Files and batches of all tenants as objects. Calls block: they are for threads.

tenants/<tenant>/files/<id>.json, <id>.data          a file: its record, and its bytes
tenants/<tenant>/batches/<id>.json                   a batch: its record, written by its creation and then by the driver alone
tenants/<tenant>/answers/<id>/<kind>/<number>.<hex>  answers so far, a line each; `kind`: output or errors
open/<tenant>/<id>                                   the batch has not ended
cancelled/<tenant>/<id>                              a client cancels the batch
expires/<seconds>.<tenant>.<id>                      when to delete the file, or an upload that was not finished
"""

from __future__ import annotations

import asyncio
import math
import re
import secrets
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, BinaryIO, TypeVar
from urllib.parse import quote, unquote

from pydantic import BaseModel, ValidationError

from qlm_core.vocabulary.errors import NotFound, QueueFull
from qlm_gateway.batches.objects import ObjectChanged, Objects, ObjectWriter
from qlm_gateway.batches.records import TERMINAL, BatchRecord, FileRecord
from qlm_gateway.batches.settings import BatchSettings

ID = re.compile(r"(file|batch)-[0-9a-f]{24}")
EXPIRY = re.compile(r"expires/(\d{12})\.([^./]+)\.(file-[0-9a-f]{24})")
OUTPUT = "batch_output"
"""Purpose of the files of answers."""
UPLOAD_KEPT_S = 86_400.0
THREADS_MAX = 16
"""Calls at once; and reads of a list of records."""
SAVE_TRIES = 5
R = TypeVar("R", bound=BaseModel)
T = TypeVar("T")


def new_id(kind: str) -> str:
    """`kind`: file or batch."""
    return f"{kind}-{secrets.token_hex(12)}"


class FileInUse(Exception):
    """A batch still needs the file."""


class BatchEnded(Exception):
    """The batch has ended under another driver."""


@dataclass(slots=True, kw_only=True)
class Upload:
    """A file's bytes before `add_file`. `expiry`: the object that has them deleted later. `in_doubt`: whether they may be there already,
    without a record."""

    writer: ObjectWriter
    expiry: str
    in_doubt: bool = False


class BatchStore:
    """Raises OSError where the objects cannot be used."""

    def __init__(self, objects: Objects, settings: BatchSettings) -> None:
        self.objects = objects
        self._settings = settings
        self._threads = ThreadPoolExecutor(THREADS_MAX, "batches")

    async def do(self, work: Callable[..., T], *arguments: Any) -> T:
        """Runs a blocking call in a thread of the store's own: a slow store delays nothing else. A cancelled caller waits for its end."""
        call = asyncio.get_running_loop().run_in_executor(self._threads, work, *arguments)
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            await asyncio.wait([call])
            if not call.cancelled():
                call.exception()  # nobody else asks for it
            raise

    # Files ------------------------------------------------------------------------------------------------------------

    def begin_file(self, tenant: str, file_id: str, now_s: float) -> Upload:
        """The caller ends it with `add_file` or not, and always with `end_upload`."""
        expiry = self._mark_expiry(tenant, file_id, now_s + UPLOAD_KEPT_S)
        return Upload(writer=self.objects.begin(_data(tenant, file_id)), expiry=expiry)

    def add_file(self, upload: Upload, record: FileRecord) -> None:
        """Makes written bytes a file. Raises QueueFull for a tenant without room; answers of a batch always have some."""
        if record.purpose != OUTPUT:
            self._check_room(record)
        upload.in_doubt = True
        upload.writer.commit()
        if record.expires_s is not None:
            self._mark_expiry(record.tenant, record.id, record.expires_s)
        self._write(_name(record.tenant, "files", record.id), record)
        upload.in_doubt = False

    def end_upload(self, upload: Upload) -> None:
        """Drops the bytes unless they became a file."""
        upload.writer.abort()
        if not upload.in_doubt:
            self.objects.delete(upload.expiry)

    def _check_room(self, record: FileRecord) -> None:
        held = self.objects.names(_name(record.tenant, "files"))
        if sum(name.endswith(".json") for name, _ in held) >= self._settings.tenant_files_max:
            raise QueueFull(f"a tenant has at most {self._settings.tenant_files_max} files: delete some", details={"bound": "files"})
        held_bytes = sum(size for name, size in held if name.endswith(".data"))
        if held_bytes + record.size > self._settings.tenant_bytes_max:
            raise QueueFull(
                f"a tenant's files have at most {self._settings.tenant_bytes_max} bytes: delete some",
                details={"bound": "file_bytes", "limit": str(self._settings.tenant_bytes_max), "held": str(held_bytes)},
            )

    def files(self, tenant: str) -> list[FileRecord]:
        """The newest first."""
        return self._newest(_name(tenant, "files"), FileRecord)

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises NotFound."""
        return self._read(tenant, "files", file_id, FileRecord)

    def open_file(self, record: FileRecord) -> BinaryIO:
        """Its bytes. Raises NotFound where it was deleted."""
        try:
            return self.objects.open(_data(record.tenant, record.id))
        except FileNotFoundError:
            raise _not_found(record.id) from None

    def delete_file(self, record: FileRecord) -> None:
        """Raises FileInUse for the input of a batch that has not ended."""
        if self._is_read(record):
            raise FileInUse(f"a batch that has not ended reads {record.id}")
        expiry = self._mark_expiry(record.tenant, record.id, 0.0)  # where this gateway is killed now, the rest is deleted later
        self._delete(record.tenant, record.id)
        self.objects.delete(expiry)
        if record.expires_s is not None:
            self.objects.delete(_expiry(record.tenant, record.id, record.expires_s))

    def delete_expired(self, now_s: float) -> None:
        """Deletes files whose time is over, and what is left of uploads that broke off a day ago."""
        for name, _ in self.objects.names("expires"):
            found = EXPIRY.fullmatch(name)
            if found is None or int(found[1]) > now_s:
                continue
            tenant, file_id = unquote(found[2]), found[3]
            record = None
            with suppress(NotFound):
                record = self.file(tenant, file_id)
            if record is None or (record.expires_s is not None and record.expires_s <= now_s):
                if record is not None and self._is_read(record):
                    continue
                self._delete(tenant, file_id)
            self.objects.delete(name)

    def _delete(self, tenant: str, file_id: str) -> None:
        self.objects.delete(f"{_name(tenant, 'files', file_id)}.json")
        self.objects.delete(_data(tenant, file_id))

    def _mark_expiry(self, tenant: str, file_id: str, at_s: float) -> str:
        name = _expiry(tenant, file_id, at_s)
        self.objects.write(name, b"")
        return name

    def _is_read(self, record: FileRecord) -> bool:
        ids = [name.rpartition("/")[2] for name, _ in self.objects.names(f"open/{_segment(record.tenant)}")]
        batches = (self.batch(record.tenant, batch_id) for batch_id in ids)
        return any(each.input_file_id == record.id and each.state not in TERMINAL for each in batches)

    # Batches ----------------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        """Adds a batch. Beyond `tenant_files_max` the oldest ended one is deleted. Raises QueueFull where all are open."""
        if len(self.objects.names(_name(record.tenant, "batches"))) >= self._settings.tenant_files_max:
            ended = [each for each in self.batches(record.tenant) if each.state in TERMINAL]
            if not ended:
                raise QueueFull(f"a tenant has at most {self._settings.tenant_files_max} batches", details={"bound": "batches"})
            self.close(ended[-1])
            self.objects.delete(f"{_name(record.tenant, 'batches', ended[-1].id)}.json")
        self._write(_name(record.tenant, "batches", record.id), record)
        self.objects.write(_flag("open", record), b"")

    def save(self, record: BatchRecord) -> None:
        """Raises BatchEnded instead of changing a batch that has ended: a driver that lost its lease may still run."""
        name, content = f"{_name(record.tenant, 'batches', record.id)}.json", record.model_dump_json().encode()
        for _ in range(SAVE_TRIES):
            stored = self.objects.read(name)
            if stored.content == content:
                return
            if BatchRecord.model_validate_json(stored.content).state in TERMINAL:
                raise BatchEnded(record.id)
            with suppress(ObjectChanged):
                self.objects.write(name, content, stored.version)
                return
        raise OSError(f"another driver changes the record of {record.id}")

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises NotFound."""
        return self._read(tenant, "batches", batch_id, BatchRecord)

    def batches(self, tenant: str) -> list[BatchRecord]:
        """The newest first."""
        return self._newest(_name(tenant, "batches"), BatchRecord)

    def open_batches(self) -> list[tuple[str, str]]:
        """Tenants and ids of those that have not ended."""
        names = [name.split("/") for name, _ in self.objects.names("open")]
        return [(unquote(parts[1]), parts[2]) for parts in names if len(parts) == 3]

    def cancel(self, record: BatchRecord) -> None:
        self.objects.write(_flag("cancelled", record), b"")

    def is_cancelled(self, record: BatchRecord) -> bool:
        try:
            self.objects.read(_flag("cancelled", record))
        except FileNotFoundError:
            return False
        return True

    def close(self, record: BatchRecord) -> None:
        """Forgets the answers and flags of a batch whose end is saved."""
        for name, _ in self.objects.names(answers_of(record)):
            self.objects.delete(name)
        for flag in ("cancelled", "open"):
            self.objects.delete(_flag(flag, record))

    def _write(self, name: str, record: BaseModel) -> None:
        self.objects.write(f"{name}.json", record.model_dump_json().encode())

    def _read(self, tenant: str, kind: str, record_id: str, cls: type[R]) -> R:
        if ID.fullmatch(record_id) is None:
            raise _not_found(record_id)
        try:
            return cls.model_validate_json(self.objects.read(f"{_name(tenant, kind, record_id)}.json").content)
        except FileNotFoundError:
            raise _not_found(record_id) from None

    def _newest(self, folder: str, cls: type[R]) -> list[R]:
        def read(name: str) -> Iterable[R]:
            with suppress(FileNotFoundError, ValidationError):  # deleted meanwhile, or damaged: the others are shown
                return (cls.model_validate_json(self.objects.read(name).content),)
            return ()

        names = [name for name, _ in self.objects.names(folder) if name.endswith(".json")]
        with ThreadPoolExecutor(THREADS_MAX) as threads:
            records = [record for found in threads.map(read, names) for record in found]
        return sorted(records, key=lambda record: (record.created_s, record.id), reverse=True)  # type: ignore[attr-defined]


def answers_of(record: BatchRecord) -> str:
    """The folder of a batch's answers."""
    return _name(record.tenant, "answers", record.id)


def _segment(tenant: str) -> str:
    return quote(tenant, safe="").replace(".", "%2E")


def _name(tenant: str, *rest: str) -> str:
    return "/".join(("tenants", _segment(tenant), *rest))


def _data(tenant: str, file_id: str) -> str:
    return f"{_name(tenant, 'files', file_id)}.data"


def _expiry(tenant: str, file_id: str, at_s: float) -> str:
    return f"expires/{math.ceil(at_s):012d}.{_segment(tenant)}.{file_id}"


def _flag(kind: str, record: BatchRecord) -> str:
    return f"{kind}/{_segment(record.tenant)}/{record.id}"


def _not_found(record_id: str) -> NotFound:
    return NotFound(f"no such {record_id[:64]!r}", reason="UNKNOWN_REQUEST", details={"id": record_id[:64]})
