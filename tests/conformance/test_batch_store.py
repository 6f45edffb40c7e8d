"""Files and batches in a folder and in a bucket: one suite."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from batch_places import PLACES, opened_place
from qlm_core.vocabulary.errors import NotFound, QueueFull
from qlm_gateway.batches.answers import ERRORS, OUTPUT, PART_BYTES, Answers
from qlm_gateway.batches.objects import Objects, ObjectWriter, Stored, open_objects
from qlm_gateway.batches.records import BatchRecord, BatchState, FileRecord
from qlm_gateway.batches.settings import BatchSettings
from qlm_gateway.batches.store import UPLOAD_KEPT_S, BatchEnded, BatchStore, FileInUse, answers_of

BATCH = BatchRecord(
    id="batch-" + "0" * 24, tenant="a/../b", input_file_id="file-" + "0" * 24, endpoint="/v1/completions", window="1h", created_s=0.0
)
FILE = FileRecord(id="file-" + "0" * 24, tenant=BATCH.tenant, filename="f", purpose="batch", size=5, created_s=5.0, expires_s=10.0)
NOW_S = 1_000.0


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with opened_place(request.param, tmp_path / "place", monkeypatch) as opened:
        yield opened


@pytest.fixture
def objects(place: str) -> Objects:
    return open_objects(place)


def store_of(objects: Objects, **bounds: Any) -> BatchStore:
    return BatchStore(objects, BatchSettings(**bounds))


def add_file(store: BatchStore, record: FileRecord, content: bytes = b"bytes") -> None:
    upload = store.begin_file(record.tenant, record.id, record.created_s)
    try:
        upload.writer.write(content)
        store.add_file(upload, record)
    finally:
        store.end_upload(upload)


def content_of(file: BinaryIO) -> bytes:
    with file:
        return file.read()


# Files and batches ----------------------------------------------------------------------------------------------------


def test_a_tenant_has_its_own_objects_whatever_its_name(place: str, objects: Objects, tmp_path: Path) -> None:
    store = store_of(objects)
    store.add_batch(BATCH)
    assert store.open_batches() == [(BATCH.tenant, BATCH.id)]
    for tenant in ("..", ".", "a b", "%2e", "~" * 64, "/" * 64):
        record = FILE.model_copy(update={"tenant": tenant})
        add_file(store, record)
        assert store.files(tenant) == [record]
        assert store.file(tenant, record.id) == record
        assert content_of(store.open_file(record)) == b"bytes"
        for file_id in ("file-" + "1" * 24, "../x", "file-"):
            with pytest.raises(NotFound):
                store.file(tenant, file_id)
    assert {path.name for path in tmp_path.iterdir()} <= {"place"}
    store.delete_expired(9.0)
    assert store.files("..")
    store.delete_expired(10.0)
    assert not store.files("..")
    assert not objects.names("expires")
    with pytest.raises(NotFound):
        store.open_file(FILE)


def test_files_have_bounds_and_answers_have_room(objects: Objects) -> None:
    store = store_of(objects, tenant_files_max=2, tenant_bytes_max=12)
    add_file(store, FILE)
    second = FILE.model_copy(update={"id": "file-" + "1" * 24})
    with pytest.raises(QueueFull) as full:
        add_file(store, second.model_copy(update={"size": 8}))
    assert full.value.details["held"] == "5"
    add_file(store, second)
    third = FILE.model_copy(update={"id": "file-" + "2" * 24, "size": 0})
    with pytest.raises(QueueFull):
        add_file(store, third)
    add_file(store, third.model_copy(update={"purpose": "batch_output"}))
    assert len(store.files(FILE.tenant)) == 3


def test_the_input_of_an_open_batch_stays(objects: Objects) -> None:
    store = store_of(objects)
    add_file(store, FILE)
    store.add_batch(BATCH)
    with pytest.raises(FileInUse):
        store.delete_file(FILE)
    store.delete_expired(NOW_S)
    assert store.files(FILE.tenant)
    store.save(BATCH.moved(BatchState.COMPLETED, 9.0))
    store.close(BATCH)
    store.delete_file(FILE)
    assert not objects.names("expires")
    assert not objects.names("open")
    assert [name for name, _ in objects.names("tenants")] == [f"tenants/a%2F%2E%2E%2Fb/batches/{BATCH.id}.json"]


def test_of_too_many_batches_the_oldest_that_has_ended_is_forgotten(objects: Objects) -> None:
    store = store_of(objects, tenant_files_max=2)
    first, second, third = (BATCH.model_copy(update={"id": f"batch-{number:024x}", "created_s": float(number)}) for number in range(3))
    store.add_batch(first)
    store.add_batch(second)
    with pytest.raises(QueueFull):
        store.add_batch(third)
    store.save(second.moved(BatchState.COMPLETED, 9.0))
    store.add_batch(third)
    assert [each.id for each in store.batches(BATCH.tenant)] == [third.id, first.id]
    assert store.open_batches() == [(BATCH.tenant, first.id), (BATCH.tenant, third.id)]


def test_a_driver_without_its_lease_changes_no_batch_that_has_ended(objects: Objects) -> None:
    store = store_of(objects)
    store.add_batch(BATCH)
    store.cancel(BATCH)
    assert store.is_cancelled(BATCH)
    stale = BATCH.moved(BatchState.IN_PROGRESS, 1.0, total=2)
    answers = Answers(objects, BATCH)
    answers.add(1, "one", {"body": {}}, None)
    answers.save()
    store.save(stale)
    ended = stale.moved(BatchState.CANCELLED, 2.0)
    store.save(ended)
    store.close(ended)
    store.save(ended)
    assert not store.is_cancelled(BATCH)
    with pytest.raises(BatchEnded):
        store.save(stale)
    assert store.batch(BATCH.tenant, BATCH.id) == ended
    writer = objects.begin("whole")
    with pytest.raises(OSError, match="deleted answers"):
        answers.whole(OUTPUT, writer)
    writer.abort()


def test_threads_that_end_a_batch_at_once_leave_one_end(place: str, objects: Objects) -> None:
    """A bucket decides it in one step. A folder compares before it replaces, so there the last of two may win."""
    store = store_of(objects)
    store.add_batch(BATCH)
    won, lost = [], []

    def end(number: int) -> None:
        try:
            store.save(BATCH.moved(BatchState.COMPLETED, 9.0, completed=number))
            won.append(number)
        except (BatchEnded, OSError):
            lost.append(number)

    threads = [threading.Thread(target=end, args=(number,)) for number in range(1, 6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(won) + len(lost) == 5
    assert store.batch(BATCH.tenant, BATCH.id).completed in won
    if place.startswith("s3://"):
        assert len(won) == 1


# Answers --------------------------------------------------------------------------------------------------------------


def whole(answers: Answers, objects: Objects, kind: str) -> list[dict[str, Any]]:
    writer = objects.begin("whole")
    size = answers.whole(kind, writer)
    writer.commit()
    content = content_of(objects.open("whole"))
    assert len(content) == size
    return [json.loads(line) for line in content.splitlines()]


@pytest.mark.parametrize("torn", [b'{"id": "batch_req_x_3", "custom', b"\x00\x00", b'{"id": "nonsense"}\n', b"[]\n"])
def test_half_an_answer_is_none(objects: Objects, torn: bytes) -> None:
    answers = Answers(objects, BATCH)
    answers.add(1, "one", {"body": {}}, None)
    answers.add(2, "two", None, {"code": "expired"})
    answers.add(1, "one", {"body": {"again": True}}, None)
    answers.save()
    objects.write(f"{answers_of(BATCH)}/{OUTPUT}/000001.torn", torn)
    again = Answers(objects, BATCH)
    assert (again.done, again.completed, again.failed) == ({1, 2}, 1, 1)
    again.add(3, "three", {"body": {}}, None)
    again.save()
    assert [each["custom_id"] for each in whole(again, objects, OUTPUT)] == ["one", "three"]
    assert [each["error"] for each in whole(again, objects, ERRORS)] == [{"code": "expired"}]


def test_two_drivers_that_both_answered_a_line_leave_one_answer(objects: Objects) -> None:
    one, other = Answers(objects, BATCH), Answers(objects, BATCH)
    for number, answers in enumerate((one, other, one), start=1):
        answers.add(number % 2 + 1, "same", {"body": {"by": number}}, None)
        answers.save()
    other.add(1, "same", None, {"code": "cancelled"})
    other.save()
    last = Answers(objects, BATCH)
    assert (last.completed, last.failed) == (2, 0)
    assert len(whole(last, objects, OUTPUT)) == 2
    assert whole(last, objects, ERRORS) == []


def test_parts_stay_few_and_small(objects: Objects) -> None:
    answers = Answers(objects, BATCH)
    for number in range(1, 61):
        answers.add(number, f"c{number}", {"body": "x" * 20_000}, None)
        answers.save()
    parts = objects.names(answers_of(BATCH))
    assert len(parts) == 5
    assert all(size < PART_BYTES + 21_000 for _, size in parts)
    again = Answers(objects, BATCH)
    assert again.done == set(range(1, 61))
    assert [each["custom_id"] for each in whole(again, objects, OUTPUT)] == [f"c{number}" for number in range(1, 61)]


# A gateway that is killed -------------------------------------------------------------------------------------------------


class Killed(Exception):
    """The process is gone."""


class MortalObjects:
    """Ends after some calls, as a process does."""

    def __init__(self, objects: Objects, calls: int) -> None:
        self._objects = objects
        self.left = calls
        self.writers: list[ObjectWriter] = []

    def live(self) -> Objects:
        if self.left <= 0:
            raise Killed
        self.left -= 1
        return self._objects

    def read(self, name: str) -> Stored:
        return self.live().read(name)

    def open(self, name: str) -> BinaryIO:
        return self.live().open(name)

    def write(self, name: str, content: bytes, version: str | None = None) -> None:
        self.live().write(name, content, version)

    def begin(self, name: str) -> ObjectWriter:
        self.writers.append(self.live().begin(name))
        return MortalWriter(self.writers[-1], self)

    def names(self, folder: str) -> list[tuple[str, int]]:
        return self.live().names(folder)

    def delete(self, name: str) -> None:
        self.live().delete(name)


class MortalWriter:
    def __init__(self, writer: ObjectWriter, mortal: MortalObjects) -> None:
        self._writer = writer
        self._mortal = mortal

    def write(self, piece: bytes, /) -> object:
        return self._writer.write(piece)

    def commit(self) -> None:
        self._mortal.live()
        self._writer.commit()

    def abort(self) -> None:
        self._mortal.live()
        self._writer.abort()


def killed_later_and_later(objects: Objects, work: Callable[[BatchStore], object]) -> Iterator[None]:
    """Runs work that is killed after one call, after two, and so on until it ends."""
    for calls in range(30):
        mortal = MortalObjects(objects, calls)
        try:
            work(store_of(mortal))
        except Killed:
            yield
        else:
            yield
            return
        finally:
            for writer in mortal.writers:  # as the end of a process does
                writer.abort()
    raise AssertionError("never ends")


def test_an_upload_that_is_killed_leaves_a_file_or_nothing(objects: Objects) -> None:
    store = store_of(objects)
    record = FILE.model_copy(update={"expires_s": None})
    seen = set()
    for _ in killed_later_and_later(objects, lambda dying: add_file(dying, record)):
        store.delete_expired(record.created_s + UPLOAD_KEPT_S - 1.0)
        store.delete_expired(record.created_s + UPLOAD_KEPT_S + 1.0)
        files = store.files(record.tenant)
        seen.add(len(files))
        for each in files:
            assert content_of(store.open_file(each)) == b"bytes"
            store.delete_file(each)
        assert objects.names("tenants") == []
        assert objects.names("expires") == []
    assert seen == {0, 1}


def test_a_deletion_that_is_killed_leaves_a_file_or_nothing(objects: Objects) -> None:
    store = store_of(objects)
    seen = set()
    for expires_s in (None, 2 * NOW_S):
        record = FILE.model_copy(update={"expires_s": expires_s})
        add_file(store, record)
        for _ in killed_later_and_later(objects, lambda dying, record=record: dying.delete_file(record)):  # type: ignore[misc]
            store.delete_expired(NOW_S)
            files = store.files(record.tenant)
            seen.add(len(files))
            if files:
                assert content_of(store.open_file(record)) == b"bytes"
            else:
                assert objects.names("tenants") == []
                add_file(store, record)
        store.delete_file(store.file(record.tenant, record.id))
        store.delete_expired(3 * NOW_S)
        assert objects.names("expires") == []
    assert seen == {0, 1}


def test_the_end_of_a_batch_that_is_killed_is_taken_up(objects: Objects) -> None:
    store = store_of(objects)
    ended = BATCH.moved(BatchState.COMPLETED, 9.0)
    store.add_batch(BATCH)
    answers = Answers(objects, BATCH)
    answers.add(1, "one", {"body": {}}, None)
    answers.save()
    store.cancel(BATCH)

    def end(dying: BatchStore) -> None:
        dying.save(ended)
        dying.close(ended)

    for _ in killed_later_and_later(objects, end):
        state = store.batch(BATCH.tenant, BATCH.id).state
        assert store.open_batches() or state is BatchState.COMPLETED, "what has not ended is found by the next driver"
        assert state is BatchState.COMPLETED or Answers(objects, BATCH).done == {1}
    assert [name for name, _ in objects.names("")] == [f"tenants/a%2F%2E%2E%2Fb/batches/{BATCH.id}.json"]


def test_bytes_that_a_killed_gateway_left_are_deleted_with_their_object(tmp_path: Path) -> None:
    store = store_of(open_objects(str(tmp_path)))
    upload = store.begin_file(FILE.tenant, FILE.id, 0.0)
    upload.writer.write(b"half")
    assert len(list(tmp_path.rglob("*.data.*"))) == 1
    store.delete_expired(UPLOAD_KEPT_S - 1.0)
    assert len(list(tmp_path.rglob("*.data.*"))) == 1
    store.delete_expired(UPLOAD_KEPT_S)
    upload.writer.abort()
    assert list(tmp_path.iterdir()) == []


class Doubtful(MortalObjects):
    """Fails after it wrote a large object."""

    def begin(self, name: str) -> ObjectWriter:
        writer = super().begin(name)
        commit = writer.commit

        def fail() -> None:
            commit()
            raise OSError("lost")

        writer.commit = fail  # type: ignore[method-assign]
        return writer


def test_bytes_whose_upload_seemed_to_fail_are_deleted_later(objects: Objects) -> None:
    with pytest.raises(OSError, match="lost"):
        add_file(store_of(Doubtful(objects, 100)), FILE)
    assert [name for name, _ in objects.names("tenants")] == [f"tenants/a%2F%2E%2E%2Fb/files/{FILE.id}.data"]
    store_of(objects).delete_expired(FILE.created_s + UPLOAD_KEPT_S + 1.0)
    assert objects.names("tenants") == []
