"""Feeds the lines of open batches into the queue and writes their answers. Everything that it knows is in the store and in the queue: the
next driver goes on where this one ended. A line's request id follows from its batch and its number, so no line runs twice."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Generator, Iterator, Mapping
from contextlib import closing, suppress
from itertools import islice
from typing import Any, BinaryIO, Protocol

import structlog

from qlm.api.v1.request_pb2 import Request, RequestState, Result, Slo, SloKind
from qlm_core.vocabulary.errors import CallDeadlineExceeded, GatewayFull, NotFound, QlmError, QueueFull, RequestIdConflict, Unavailable
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.batches.answers import ERRORS, OUTPUT, Answers
from qlm_gateway.batches.lines import BadLine, Line, check_file, parse_line, read_lines
from qlm_gateway.batches.records import TERMINAL, BatchRecord, BatchState, FileRecord, LineError
from qlm_gateway.batches.settings import BatchSettings
from qlm_gateway.batches.store import OUTPUT as OUTPUT_PURPOSE
from qlm_gateway.batches.store import BatchEnded, BatchStore, new_id
from qlm_gateway.front.http.settings import HttpSettings

POLL_S = 1.0
"""Period of scans for new batches and cancellations, after which counts and answers are saved."""
WAIT_S = 300.0
"""Longest wait for an end before it is polled again."""
RETRY_MIN_S, RETRY_MAX_S = 0.2, 30.0
LINES_AT_ONCE = 64
"""Lines that a thread reads at a time."""
EXPIRED_FILES_EVERY_S = 60.0
PASSING = (QueueFull, Unavailable, GatewayFull, CallDeadlineExceeded)


class Requests(Protocol):
    """The queue, as the driver uses it. All raise QlmError."""

    async def submit(self, request: Request) -> None: ...

    async def end_of(self, key: RequestKey, wait_s: float) -> Result | None:
        """With its text; None where it has not ended in time. Raises NotFound for a request that the queue does not know (any more)."""

    async def cancel(self, key: RequestKey) -> None: ...


class BatchDriver:
    """`models`: name that requests may ask for -> the model. `document`: a result as the API shows it, and whether it is of a chat.
    `now_s`: the queue's clock."""

    def __init__(
        self,
        store: BatchStore,
        settings: BatchSettings,
        http: HttpSettings,
        requests: Requests,
        models: Mapping[str, str],
        document: Callable[[Result, bool], Mapping[str, Any]],
        now_s: Callable[[], float],
    ) -> None:
        self._store = store
        self._settings = settings
        self._http = http
        self._requests = requests
        self._models = models
        self._document = document
        self._now_s = now_s
        self._room = asyncio.Semaphore(settings.in_flight_max)

    async def run(self) -> None:
        """Runs until cancelled. Errors of one batch are logged, and it is tried again after RETRY_MAX_S."""
        running: dict[tuple[str, str], asyncio.Task[bool]] = {}
        again_s: dict[tuple[str, str], float] = {}
        cleaned_s = 0.0
        try:
            while True:
                for key, task in list(running.items()):
                    if task.done():
                        del running[key]
                        again_s[key] = 0.0 if task.result() else self._now_s() + RETRY_MAX_S
                try:
                    batches = await self._store.do(self._store.open_batches)
                    again_s = {key: at_s for key, at_s in again_s.items() if key in batches}
                    for key in batches:
                        if key not in running and self._now_s() >= again_s.get(key, 0.0):
                            running[key] = asyncio.create_task(self._guarded(*key))
                    if self._now_s() - cleaned_s >= EXPIRED_FILES_EVERY_S:
                        cleaned_s = self._now_s()
                        await self._store.do(self._store.delete_expired, cleaned_s)
                except OSError as error:
                    structlog.get_logger().error("batches_unreadable", error=str(error))
                await asyncio.sleep(POLL_S)
        finally:
            for task in running.values():
                task.cancel()
            if running:
                await asyncio.wait(running.values())

    async def _guarded(self, tenant: str, batch_id: str) -> bool:
        """Whether it ended."""
        try:
            await self._drive(await self._store.do(self._store.batch, tenant, batch_id))
        except BatchEnded:
            pass
        except Exception as error:  # a full disk, a damaged record or a bug costs this batch some time, and no other one
            first = error.exceptions[0] if isinstance(error, ExceptionGroup) else error
            structlog.get_logger().error("batch_failed", batch=batch_id, error=f"{type(first).__name__}: {first}")
            return False
        return True

    async def _drive(self, batch: BatchRecord) -> None:
        if batch.state in TERMINAL:  # an earlier driver was killed right before this
            await self._store.do(self._store.close, batch)
            return
        if batch.state is BatchState.VALIDATING:
            batch = await self._validated(batch)
            if batch.state is BatchState.FAILED:
                return
        answers = await self._store.do(Answers, self._store.objects, batch)
        in_flight: dict[int, RequestKey] = {}
        feeding = asyncio.create_task(self._feed(batch, answers, in_flight))
        try:
            state = await self._watch(batch, answers, feeding)
            if state is not BatchState.COMPLETED:
                feeding.cancel()
                await asyncio.wait([feeding])
                batch = batch.moved(BatchState.CANCELLING, self._now_s()) if state is BatchState.CANCELLED else batch
                await self._withdraw(in_flight)
                if state is BatchState.EXPIRED:
                    await self._store.do(self._expire_rest, batch, answers)
            await self._store.do(self._finish, batch, answers, state)
        finally:
            feeding.cancel()
            await asyncio.wait([feeding])

    async def _validated(self, batch: BatchRecord) -> BatchRecord:
        """In progress, or failed with the reasons."""
        models = {name for name, model in self._models.items() if not batch.models or model in batch.models}
        try:
            total, errors = await self._store.do(self._check, batch, models)
        except NotFound:
            total, errors = 0, [LineError(code="invalid_file", message="the input file was deleted", param="input_file_id")]
        if errors:
            batch = batch.moved(BatchState.FAILED, self._now_s(), errors=tuple(errors))
            await self._store.do(self._end, batch)
            return batch
        ids = {"output_file_id": new_id("file"), "error_file_id": new_id("file")}
        batch = batch.moved(BatchState.IN_PROGRESS, self._now_s(), total=total, **ids)
        await self._store.do(self._store.save, batch)
        return batch

    def _input(self, batch: BatchRecord) -> BinaryIO:
        """Raises NotFound."""
        return self._store.open_file(self._store.file(batch.tenant, batch.input_file_id))

    def _check(self, batch: BatchRecord, models: Collection[str]) -> tuple[int, list[LineError]]:
        return check_file(self._input(batch), batch.endpoint, self._http, self._settings.lines_max, models)

    def _lines(self, batch: BatchRecord) -> Generator[tuple[int, bytes]]:
        """Opens the input for its first line, so that a call whose task is cancelled leaves no open file."""
        yield from read_lines(self._input(batch), self._http.body_bytes_max)

    async def _watch(self, batch: BatchRecord, answers: Answers, feeding: asyncio.Task[None]) -> BatchState:
        """Saves counts and answers until all lines have one, the batch is cancelled, or its window is over; returns what it is then."""
        saved = -1
        while not feeding.done():
            await asyncio.wait([feeding], timeout=POLL_S)
            if saved != len(answers.done):
                saved = len(answers.done)
                await self._store.do(answers.save)
                answers.room.set()
                counts = {"completed": answers.completed, "failed": answers.failed}
                await self._store.do(self._store.save, batch.model_copy(update=counts))
            if feeding.done():
                break
            if await self._store.do(self._store.is_cancelled, batch):
                return BatchState.CANCELLED
            if self._now_s() >= batch.deadline_s:
                return BatchState.EXPIRED
        feeding.result()
        return BatchState.COMPLETED

    async def _feed(self, batch: BatchRecord, answers: Answers, in_flight: dict[int, RequestKey]) -> None:
        with closing(self._lines(batch)) as lines:
            chunk = await self._store.do(_next_of, lines)
            async with asyncio.TaskGroup() as tasks:
                while chunk:
                    for number, raw in chunk:
                        if number in answers.done:
                            continue
                        await answers.room.wait()
                        await self._room.acquire()
                        task = tasks.create_task(self._answered(batch, number, raw, answers, in_flight))
                        task.add_done_callback(lambda _: self._room.release())
                    chunk = await self._store.do(_next_of, lines)

    async def _answered(self, batch: BatchRecord, number: int, raw: bytes, answers: Answers, in_flight: dict[int, RequestKey]) -> None:
        """One line, to its answer."""
        key = in_flight[number] = RequestKey(batch.tenant, f"{batch.id}.{number}")
        custom_id = ""
        try:
            line = parse_line(number, raw, batch.endpoint, self._http)
            custom_id = line.custom_id
            result = await self._result(batch, line, key)
            if result.state == RequestState.REQUEST_STATE_COMPLETED:
                body = self._document(result, batch.endpoint == "/v1/chat/completions")
                answers.add(number, custom_id, {"status_code": 200, "request_id": key.request_id, "body": body}, None)
            else:
                answers.add(number, custom_id, None, {"code": result.error.reason.lower(), "message": result.error.message})
        except BadLine as error:  # the file was changed since it was checked
            answers.add(number, custom_id, None, {"code": error.error.code, "message": error.error.message})
        except QlmError as error:
            answers.add(number, custom_id, None, {"code": error.reason.lower(), "message": error.message})
        del in_flight[number]  # one that is cancelled stays: it is withdrawn

    async def _result(self, batch: BatchRecord, line: Line, key: RequestKey) -> Result:
        """Raises what refuses the request for good."""
        while True:
            left_s = max(1.0, batch.deadline_s - self._now_s())
            request = Request()
            request.CopyFrom(line.request)
            request.request_id, request.tenant, request.expire_after_s = key.request_id, key.tenant, left_s
            request.slo.CopyFrom(Slo(kind=SloKind.SLO_KIND_COMPLETION, seconds=left_s))
            try:
                with suppress(RequestIdConflict):  # an earlier driver sent it, with more time left
                    await self._requests.submit(request)
                while (result := await self._requests.end_of(key, WAIT_S)) is None:
                    pass
                return result
            except PASSING as error:
                await asyncio.sleep(min(max(error.retry_after_s or 1.0, RETRY_MIN_S), RETRY_MAX_S))
            except NotFound as error:
                if error.reason == "UNKNOWN_MODEL":
                    raise
                await asyncio.sleep(RETRY_MIN_S)  # its result is gone already: it runs again

    async def _withdraw(self, in_flight: Mapping[int, RequestKey]) -> None:
        for key in list(in_flight.values()):
            with suppress(QlmError):  # never sent, or the server is away: it expires
                await self._requests.cancel(key)

    def _expire_rest(self, batch: BatchRecord, answers: Answers) -> None:
        error = {"code": "batch_expired", "message": "the batch's completion window was over before this request was answered"}
        for number, raw in self._lines(batch):
            with suppress(BadLine):
                answers.add(number, parse_line(number, raw, batch.endpoint, self._http).custom_id, None, error)

    def _finish(self, batch: BatchRecord, answers: Answers, state: BatchState) -> None:
        counts = {"completed": answers.completed, "failed": answers.failed}
        now_s = self._now_s()
        batch = batch.moved(BatchState.FINALIZING, now_s, **counts)
        self._store.save(batch)
        answers.save()
        for kind, file_id, lines in ((OUTPUT, batch.output_file_id, answers.completed), (ERRORS, batch.error_file_id, answers.failed)):
            if lines:
                upload = self._store.begin_file(batch.tenant, file_id, now_s)
                try:
                    record = FileRecord(
                        id=file_id,
                        tenant=batch.tenant,
                        filename=f"{batch.id}_{kind}.jsonl",
                        purpose=OUTPUT_PURPOSE,
                        size=answers.whole(kind, upload.writer),
                        created_s=now_s,
                        expires_s=None if batch.keep_output_s is None else now_s + batch.keep_output_s,
                    )
                    self._store.add_file(upload, record)
                finally:
                    self._store.end_upload(upload)
        self._end(batch.moved(state, now_s))

    def _end(self, batch: BatchRecord) -> None:
        self._store.save(batch)
        self._store.close(batch)


def _next_of(lines: Iterator[tuple[int, bytes]]) -> list[tuple[int, bytes]]:
    return list(islice(lines, LINES_AT_ONCE))
