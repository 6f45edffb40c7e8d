"""Routes of files and batches."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, BinaryIO, Literal, TypeVar

from aiohttp import BodyPartReader, web
from aiohttp.http import HttpProcessingError
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from qlm_core.vocabulary.errors import InvalidRequest, PermissionDenied, Unavailable, invalid_field
from qlm_core.vocabulary.name_rules import checked_tenant
from qlm_gateway.batches.lines import ENDPOINTS
from qlm_gateway.batches.objects import PIECE_BYTES, ObjectWriter
from qlm_gateway.batches.records import (
    METADATA_KEY_MAX,
    METADATA_MAX,
    METADATA_VALUE_MAX,
    TERMINAL,
    WINDOWS_S,
    BatchRecord,
    FileRecord,
)
from qlm_gateway.batches.settings import BatchSettings
from qlm_gateway.batches.store import BatchStore, FileInUse, new_id
from qlm_gateway.front.callers import Caller, Callers
from qlm_gateway.front.http.completions import metadata_of
from qlm_gateway.front.http.errors import HttpError
from qlm_gateway.front.http.responses import json_response

FIELD_BYTES_MAX = 1 << 10
LIST_MAX, LIST_DEFAULT = 10_000, 20
EXPIRES_MIN_S, EXPIRES_MAX_S = 3_600, 30 * 86_400
T = TypeVar("T", FileRecord, BatchRecord)
Result = TypeVar("Result")


class _ExpiresAfter(BaseModel):
    model_config = ConfigDict(strict=True)

    anchor: Literal["created_at"]
    seconds: int = Field(ge=EXPIRES_MIN_S, le=EXPIRES_MAX_S)


class NewBatch(BaseModel):
    """The body of `POST /v1/batches`."""

    model_config = ConfigDict(strict=True, extra="ignore")

    input_file_id: str
    endpoint: str
    completion_window: str
    metadata: dict[str, str] | None = None
    output_expires_after: _ExpiresAfter | None = None


class BatchRoutes:
    """Errors of the store are UNAVAILABLE. `piece_timeout_s`: longest pause within an upload. `now_s`: the queue's clock."""

    def __init__(
        self, store: BatchStore, settings: BatchSettings, callers: Callers, now_s: Callable[[], float], piece_timeout_s: float
    ) -> None:
        self._store = store
        self._settings = settings
        self._callers = callers
        self._now_s = now_s
        self._piece_timeout_s = piece_timeout_s

    def routes(self) -> Sequence[web.RouteDef]:
        return (
            web.post("/v1/files", self._add_file),
            web.get("/v1/files", self._files),
            web.get("/v1/files/{id}", self._file),
            web.get("/v1/files/{id}/content", self._content, allow_head=False),
            web.delete("/v1/files/{id}", self._delete_file),
            web.post("/v1/batches", self._add_batch),
            web.get("/v1/batches", self._batches),
            web.get("/v1/batches/{id}", self._batch),
            web.post("/v1/batches/{id}/cancel", self._cancel),
        )

    # Files ------------------------------------------------------------------------------------------------------------

    async def _add_file(self, http: web.Request) -> web.StreamResponse:
        if not http.content_type.startswith("multipart/"):
            raise HttpError(415, "unsupported_media_type", "a file is sent as multipart/form-data")
        tenant = self._tenant(http)
        file_id = new_id("file")
        opening = self._started(self._store.begin_file, tenant, file_id, self._now_s())
        try:
            upload = await asyncio.shield(opening)
            record = await self._received(http, tenant, file_id, upload.writer)
            await self._do(self._store.add_file, upload, record)
        finally:
            await self._do(self._store.end_upload, await opening)
        return json_response(record.document())

    async def _received(self, http: web.Request, tenant: str, file_id: str, writer: ObjectWriter) -> FileRecord:
        """Writes the part `file`. Raises InvalidRequest and HttpError."""
        fields: dict[str, str] = {}
        filename, size = "", -1
        try:
            reader = await http.multipart()
            while (part := await self._piece(reader.next())) is not None:
                if not isinstance(part, BodyPartReader):
                    raise invalid_field("body", "parts that are not multipart themselves")
                if part.name == "file":
                    filename, size = part.filename or "upload", await self._written(part, writer)
                elif part.name is not None and len(fields) < 16:
                    fields[part.name] = (await self._piece(part.read_chunk(FIELD_BYTES_MAX))).decode(errors="replace")
        except (ValueError, HttpProcessingError) as error:  # the latter: headers of a part
            raise InvalidRequest("the body is not multipart/form-data", details={"field": "file", "rule": "multipart"}) from error
        if size < 0:
            raise invalid_field("file", "present")
        if fields.get("purpose") != "batch":
            raise invalid_field("purpose", "batch")
        expires_s = None
        if "expires_after[seconds]" in fields:
            if fields.get("expires_after[anchor]") != "created_at":
                raise invalid_field("expires_after[anchor]", "created_at")
            text = fields["expires_after[seconds]"]
            if not text.isdecimal() or not EXPIRES_MIN_S <= int(text) <= EXPIRES_MAX_S:
                raise invalid_field("expires_after[seconds]", f"a whole number from {EXPIRES_MIN_S} to {EXPIRES_MAX_S}")
            expires_s = self._now_s() + int(text)
        return FileRecord(
            id=file_id,
            tenant=tenant,
            filename=filename[:256],
            purpose="batch",
            size=size,
            created_s=self._now_s(),
            expires_s=expires_s,
        )

    async def _written(self, part: BodyPartReader, writer: ObjectWriter) -> int:
        size = 0
        while piece := await self._piece(part.read_chunk(PIECE_BYTES)):
            size += len(piece)
            if size > self._settings.file_bytes_max:
                raise HttpError(413, "request_entity_too_large", f"a file has at most {self._settings.file_bytes_max} bytes")
            await self._do(writer.write, piece)
        return size

    async def _piece(self, reading: Any) -> Any:
        try:
            async with asyncio.timeout(self._piece_timeout_s):
                return await reading
        except TimeoutError:
            raise HttpError(408, "body_timeout", "the body did not arrive in time") from None

    async def _files(self, http: web.Request) -> web.StreamResponse:
        purpose = http.query.get("purpose")
        files = await self._do(self._store.files, self._tenant(http))
        return _page(http, [each for each in files if purpose in (None, each.purpose)])

    async def _file(self, http: web.Request) -> web.StreamResponse:
        return json_response((await self._file_of(http)).document())

    async def _content(self, http: web.Request) -> web.StreamResponse:
        record = await self._file_of(http)
        opening = self._started(self._store.open_file, record)
        try:
            return await self._send(http, record, await asyncio.shield(opening))
        finally:
            await self._do((await opening).close)

    async def _send(self, http: web.Request, record: FileRecord, file: BinaryIO) -> web.StreamResponse:
        response = web.StreamResponse(headers={"Content-Type": "application/octet-stream", "Content-Length": str(record.size)})
        await response.prepare(http)
        try:
            while piece := await self._do(file.read, PIECE_BYTES):
                await response.write(piece)
        except Unavailable as error:  # of an answer that has begun the client sees the end of its connection alone
            raise ConnectionAbortedError("the file cannot be read") from error
        await response.write_eof()
        return response

    async def _delete_file(self, http: web.Request) -> web.StreamResponse:
        record = await self._file_of(http)
        try:
            await self._do(self._store.delete_file, record)
        except FileInUse as error:
            raise HttpError(409, "file_in_use", str(error)) from None
        return json_response({"id": record.id, "object": "file", "deleted": True})

    async def _file_of(self, http: web.Request) -> FileRecord:
        return await self._do(self._store.file, self._tenant(http), http.match_info["id"])

    # Batches ----------------------------------------------------------------------------------------------------------

    async def _add_batch(self, http: web.Request) -> web.StreamResponse:
        caller = self._caller(http)
        new = _new_batch(await self._piece(http.read()))
        tenant = checked_tenant(caller.tenant(""))
        file = await self._do(self._store.file, tenant, new.input_file_id)
        if caller.key is not None and caller.key.slo_s_min > WINDOWS_S[new.completion_window]:
            rule = f"at least {caller.key.slo_s_min:g} s with this API key"
            raise PermissionDenied(f"completion_window: must be {rule}", details={"field": "completion_window", "rule": rule})
        record = BatchRecord(
            id=new_id("batch"),
            tenant=tenant,
            input_file_id=file.id,
            endpoint=new.endpoint,
            window=new.completion_window,
            created_s=self._now_s(),
            models=() if caller.key is None else caller.key.models,
            metadata=new.metadata,
            keep_output_s=None if new.output_expires_after is None else new.output_expires_after.seconds,
        )
        await self._do(self._store.add_batch, record)
        return json_response(record.document())

    async def _batches(self, http: web.Request) -> web.StreamResponse:
        return _page(http, await self._do(self._store.batches, self._tenant(http)))

    async def _batch(self, http: web.Request) -> web.StreamResponse:
        return json_response((await self._batch_of(http)).document())

    async def _cancel(self, http: web.Request) -> web.StreamResponse:
        record = await self._batch_of(http)
        if record.state in TERMINAL:
            raise HttpError(409, "batch_ended", f"the batch is {record.state}")
        await self._do(self._store.cancel, record)
        return json_response({**record.document(), "status": "cancelling", "cancelling_at": int(self._now_s())})

    async def _batch_of(self, http: web.Request) -> BatchRecord:
        return await self._do(self._store.batch, self._tenant(http), http.match_info["id"])

    # Both -------------------------------------------------------------------------------------------------------------

    def _caller(self, http: web.Request) -> Caller:
        return self._callers.caller(metadata_of(http))

    def _tenant(self, http: web.Request) -> str:
        return checked_tenant(self._caller(http).tenant(""))

    def _started(self, work: Callable[..., Result], *arguments: Any) -> asyncio.Future[Result]:
        """As `_do`, at once and to its end: what it opens is there to be closed, also where the caller is cancelled meanwhile."""
        return asyncio.ensure_future(self._do(work, *arguments))

    async def _do(self, work: Callable[..., Result], *arguments: Any) -> Result:
        try:
            return await self._store.do(work, *arguments)
        except OSError as error:
            raise Unavailable(f"the store of files cannot be used: {error.strerror}", details={"retry_after_s": "5"}) from error


def _new_batch(body: bytes) -> NewBatch:
    try:
        new = NewBatch.model_validate_json(body)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        field = ".".join(str(step) for step in first["loc"])
        raise InvalidRequest(f"{field or 'the body'}: {first['msg']}", details={"field": field, "rule": first["msg"]}) from None
    if new.endpoint not in ENDPOINTS:
        raise invalid_field("endpoint", " or ".join(ENDPOINTS))
    if new.completion_window not in WINDOWS_S:
        raise invalid_field("completion_window", ", ".join(WINDOWS_S))
    pairs = new.metadata or {}
    if len(pairs) > METADATA_MAX or any(len(name) > METADATA_KEY_MAX or len(value) > METADATA_VALUE_MAX for name, value in pairs.items()):
        raise invalid_field("metadata", f"at most {METADATA_MAX} pairs of {METADATA_KEY_MAX} and {METADATA_VALUE_MAX} characters")
    return new


def _page(http: web.Request, records: Sequence[T]) -> web.Response:
    """The records behind `after`, `limit` of them."""
    text = http.query.get("limit", str(LIST_DEFAULT))
    if not text.isdecimal() or not 1 <= int(text) <= LIST_MAX:
        raise invalid_field("limit", f"a whole number from 1 to {LIST_MAX}")
    ids = [each.id for each in records]
    after = http.query.get("after")
    begin = ids.index(after) + 1 if after in ids else 0
    page = records[begin : begin + int(text)]
    return json_response(
        {
            "object": "list",
            "data": [each.document() for each in page],
            "first_id": page[0].id if page else None,
            "last_id": page[-1].id if page else None,
            "has_more": begin + len(page) < len(records),
        }
    )
