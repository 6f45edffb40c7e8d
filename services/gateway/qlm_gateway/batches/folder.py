"""The folder of files and batches, shared by all gateways. Calls block: they are for threads.

<tenant>/files/<id>.json, <id>.data         a file: its record, and its bytes
<tenant>/batches/<id>.json                  a batch: its record, written by its creation and then by the driver alone
<tenant>/batches/<id>.open                  it has not ended
<tenant>/batches/<id>.cancel                a client cancels it
<tenant>/batches/<id>.output, <id>.errors   answers so far, a line each
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar
from urllib.parse import quote, unquote

from pydantic import BaseModel, ValidationError

from qlm_core.vocabulary.errors import NotFound, QueueFull
from qlm_gateway.batches.records import TERMINAL, BatchRecord, FileRecord
from qlm_gateway.batches.settings import BatchSettings

ID = re.compile(r"(file|batch)-[0-9a-f]{24}")
OUTPUT = "batch_output"
"""Purpose of the files of answers."""
PART_KEPT_S = 86_400.0
R = TypeVar("R", bound=BaseModel)


def new_id(kind: str) -> str:
    """`kind`: file or batch."""
    return f"{kind}-{secrets.token_hex(12)}"


class FileInUse(Exception):
    """A batch still needs the file."""


class BatchFolder:
    """Raises OSError where the folder cannot be used."""

    def __init__(self, settings: BatchSettings) -> None:
        self._root = Path(settings.folder)
        self._settings = settings

    # Files ------------------------------------------------------------------------------------------------------------

    def begin_file(self, tenant: str) -> Path:
        """Where the bytes of a new file are written, until `add_file`."""
        folder = self._of(tenant, "files")
        folder.mkdir(parents=True, exist_ok=True)
        return folder / f".{new_id('file')}.part"

    def add_file(self, written: Path, record: FileRecord) -> None:
        """Makes written bytes a file. Raises QueueFull for a tenant without room; answers of a batch always have some."""
        if record.purpose != OUTPUT:
            self._check_room(record)
        os.replace(written, self.data(record))
        _write(self._of(record.tenant, "files") / f"{record.id}.json", record)

    def _check_room(self, record: FileRecord) -> None:
        files = self.files(record.tenant)
        if len(files) >= self._settings.tenant_files_max:
            raise QueueFull(f"a tenant has at most {self._settings.tenant_files_max} files: delete some", details={"bound": "files"})
        held = sum(each.size for each in files)
        if held + record.size > self._settings.tenant_bytes_max:
            raise QueueFull(
                f"a tenant's files have at most {self._settings.tenant_bytes_max} bytes: delete some",
                details={"bound": "file_bytes", "limit": str(self._settings.tenant_bytes_max), "held": str(held)},
            )

    def files(self, tenant: str) -> list[FileRecord]:
        """The newest first."""
        return _newest(self._of(tenant, "files"), FileRecord)

    def file(self, tenant: str, file_id: str) -> FileRecord:
        """Raises NotFound."""
        return _read(self._of(tenant, "files"), file_id, FileRecord)

    def data(self, record: FileRecord) -> Path:
        """Its bytes."""
        return self._of(record.tenant, "files") / f"{record.id}.data"

    def delete_file(self, record: FileRecord) -> None:
        """Raises FileInUse for the input of a batch that has not ended."""
        if self._is_read(record):
            raise FileInUse(f"a batch that has not ended reads {record.id}")
        (self._of(record.tenant, "files") / f"{record.id}.json").unlink(missing_ok=True)
        self.data(record).unlink(missing_ok=True)

    def delete_expired(self, now_s: float) -> None:
        """Deletes files whose time is over, and what is left of uploads that broke off a day ago."""
        for tenant in self._tenants():
            for record in self.files(tenant):
                if record.expires_s is not None and record.expires_s <= now_s and not self._is_read(record):
                    self.delete_file(record)
            for part in self._of(tenant, "files").glob(".*.part"):
                if part.stat().st_mtime < now_s - PART_KEPT_S:
                    part.unlink(missing_ok=True)

    def _is_read(self, record: FileRecord) -> bool:
        ids = [batch_id for tenant, batch_id in self.open_batches() if tenant == record.tenant]
        return any(self.batch(record.tenant, batch_id).input_file_id == record.id for batch_id in ids)

    # Batches ----------------------------------------------------------------------------------------------------------

    def add_batch(self, record: BatchRecord) -> None:
        """Adds a batch. Beyond `tenant_files_max` the oldest ended one is deleted. Raises QueueFull where all are open."""
        folder = self._of(record.tenant, "batches")
        folder.mkdir(parents=True, exist_ok=True)
        batches = self.batches(record.tenant)
        if len(batches) >= self._settings.tenant_files_max:
            ended = [each for each in batches if each.state in TERMINAL]
            if not ended:
                raise QueueFull(f"a tenant has at most {self._settings.tenant_files_max} batches", details={"bound": "batches"})
            (folder / f"{ended[-1].id}.json").unlink(missing_ok=True)
        self.save(record)
        (folder / f"{record.id}.open").touch()

    def save(self, record: BatchRecord) -> None:
        _write(self._of(record.tenant, "batches") / f"{record.id}.json", record)

    def batch(self, tenant: str, batch_id: str) -> BatchRecord:
        """Raises NotFound."""
        return _read(self._of(tenant, "batches"), batch_id, BatchRecord)

    def batches(self, tenant: str) -> list[BatchRecord]:
        """The newest first."""
        return _newest(self._of(tenant, "batches"), BatchRecord)

    def open_batches(self) -> list[tuple[str, str]]:
        """Tenants and ids of those that have not ended."""
        return [(tenant, path.stem) for tenant in self._tenants() for path in sorted(self._of(tenant, "batches").glob("batch-*.open"))]

    def answers(self, record: BatchRecord, kind: str) -> Path:
        """`kind`: output or errors."""
        return self._of(record.tenant, "batches") / f"{record.id}.{kind}"

    def cancel(self, record: BatchRecord) -> None:
        (self._of(record.tenant, "batches") / f"{record.id}.cancel").touch()

    def is_cancelled(self, record: BatchRecord) -> bool:
        return (self._of(record.tenant, "batches") / f"{record.id}.cancel").exists()

    def finish(self, record: BatchRecord) -> None:
        """Saves a batch that has ended."""
        self.save(record)
        for kind in ("open", "cancel"):
            (self._of(record.tenant, "batches") / f"{record.id}.{kind}").unlink(missing_ok=True)

    def _of(self, tenant: str, kind: str) -> Path:
        return self._root / quote(tenant, safe="").replace(".", "%2E") / kind

    def _tenants(self) -> list[str]:
        return [unquote(path.name) for path in sorted(self._root.iterdir()) if path.is_dir()] if self._root.is_dir() else []


def _write(path: Path, record: BaseModel) -> None:
    """Whole or not at all, also after a power loss."""
    fresh = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    with fresh.open("w", encoding="utf-8") as file:
        file.write(record.model_dump_json())
        file.flush()
        os.fsync(file.fileno())
    os.replace(fresh, path)


def _read(folder: Path, record_id: str, kind: type[R]) -> R:
    path = folder / f"{record_id}.json"
    if ID.fullmatch(record_id) is None or not path.is_file():
        raise NotFound(f"no such {record_id[:64]!r}", reason="UNKNOWN_REQUEST", details={"id": record_id[:64]})
    return kind.model_validate_json(path.read_bytes())


def _newest(folder: Path, kind: type[R]) -> list[R]:
    def read() -> Iterator[R]:
        for path in folder.glob("*.json") if folder.is_dir() else ():
            try:
                yield kind.model_validate_json(path.read_bytes())
            except (OSError, ValidationError):  # deleted meanwhile, or damaged: the others are shown
                continue

    return sorted(read(), key=lambda record: (record.created_s, record.id), reverse=True)  # type: ignore[attr-defined]
