"""Lines of batches, and answers that a driver left half written."""

from __future__ import annotations

import asyncio
import json
import time
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from qlm.api.v1.request_pb2 import Request
from qlm_core.vocabulary.errors import QueueFull
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.batches.answers import ERRORS, OUTPUT, Answers
from qlm_gateway.batches.driver import POLL_S, BatchDriver
from qlm_gateway.batches.folder import BatchFolder
from qlm_gateway.batches.lines import ERRORS_MAX, check_file, read_lines
from qlm_gateway.batches.records import BatchRecord, BatchState, FileRecord
from qlm_gateway.batches.settings import BatchSettings
from qlm_gateway.front.http.settings import HttpSettings

BATCH = BatchRecord(
    id="batch-" + "0" * 24, tenant="a/../b", input_file_id="file-" + "0" * 24, endpoint="/v1/completions", window="1h", created_s=0.0
)
PART = st.sampled_from([b"\n", b"\r\n", b"{", b"}", b'"custom_id"', b":", b'"a"', b",", b"[", b"\xef\xbb\xbf", b"\x00", b"1e999", b"null"])


class Nobody:
    """A queue that is asked for nothing."""

    async def submit(self, request: Request) -> NoReturn:
        raise AssertionError("no line is sent")

    async def end_of(self, key: RequestKey, wait_s: float) -> NoReturn:
        raise AssertionError("no end is waited for")

    async def cancel(self, key: RequestKey) -> NoReturn:
        raise AssertionError("nothing is cancelled")


def folder_of(tmp_path: Path) -> BatchFolder:
    folder = BatchFolder(BatchSettings(folder=str(tmp_path)))
    folder.add_batch(BATCH)
    return folder


@settings(max_examples=150, deadline=None)
@given(content=st.lists(PART | st.binary(max_size=6), max_size=30).map(b"".join))
def test_whatever_a_file_holds_is_counted_or_reported(tmp_path_factory: pytest.TempPathFactory, content: bytes) -> None:
    path = tmp_path_factory.getbasetemp() / "hostile.jsonl"
    path.write_bytes(content)
    total, errors = check_file(path, "/v1/completions", HttpSettings(), 10, ["m"])
    assert errors, "none of these is a request"
    assert total >= len(errors) - 1
    assert all(each.line is None or 1 <= each.line <= content.count(b"\n") + 1 for each in errors)


def test_long_lines_are_read_in_part_and_many_errors_end_the_reading(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 50 + b"\n" + b"y\n")
    assert list(read_lines(path, 10)) == [(1, b"x" * 11), (2, b"y")]
    path.write_bytes(b"{\n" * 1_000)
    assert len(check_file(path, "/v1/completions", HttpSettings(), 5_000, ["m"])[1]) == ERRORS_MAX


@pytest.mark.parametrize("torn", [b'{"id": "batch_req_x_3", "custom', b"\x00\x00", b'{"id": "nonsense"}\n', b"[]\n"])
def test_half_an_answer_is_cut_off_and_written_again(tmp_path: Path, torn: bytes) -> None:
    folder = folder_of(tmp_path)
    answers = Answers(folder, BATCH)
    answers.add(1, "one", {"body": {}}, None)
    answers.add(2, "two", None, {"code": "expired"})
    answers.add(1, "one", {"body": {"again": True}}, None)
    answers.sync()
    answers.close()
    with folder.answers(BATCH, OUTPUT).open("ab") as file:
        file.write(torn)
    again = Answers(folder, BATCH)
    assert (again.done, again.completed, again.failed) == ({1, 2}, 1, 1)
    again.add(3, "three", {"body": {}}, None)
    again.sync()
    target = tmp_path / "whole"
    assert again.whole(OUTPUT, target) == target.stat().st_size
    assert [json.loads(line)["custom_id"] for line in target.read_bytes().splitlines()] == ["one", "three"]
    again.whole(ERRORS, target)
    assert [json.loads(line)["error"] for line in target.read_bytes().splitlines()] == [{"code": "expired"}]
    again.close()


def test_two_drivers_that_both_answered_a_line_leave_one_answer(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    one, other = Answers(folder, BATCH), Answers(folder, BATCH)
    for number, answers in enumerate((one, other, one), start=1):
        answers.add(number % 2 + 1, "same", {"body": {"by": number}}, None)
        answers.sync()
    last = Answers(folder, BATCH)
    last.whole(OUTPUT, tmp_path / "whole")
    assert [json.loads(line)["response"]["body"]["by"] for line in (tmp_path / "whole").read_bytes().splitlines()] == [1, 2]
    for answers in (one, other, last):
        answers.close()


def test_a_tenant_is_a_folder_of_its_own_whatever_its_name(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "root")
    assert folder.open_batches() == [(BATCH.tenant, BATCH.id)]
    for tenant in ("..", ".", "a b", "%2e", "é"):
        written = folder.begin_file(tenant)
        written.write_bytes(b"x")
        record = FileRecord(id="file-" + "1" * 24, tenant=tenant, filename="f", purpose="batch", size=1, created_s=5.0, expires_s=10.0)
        folder.add_file(written, record)
        assert folder.files(tenant) == [record]
    assert {path.parent for path in (tmp_path / "root").iterdir()} == {tmp_path / "root"}
    assert len(list(tmp_path.iterdir())) == 1
    folder.delete_expired(9.0)
    assert folder.files("..")
    folder.delete_expired(10.0)
    assert not folder.files("..")


def test_of_too_many_batches_the_oldest_that_has_ended_is_forgotten(tmp_path: Path) -> None:
    folder = BatchFolder(BatchSettings(folder=str(tmp_path), tenant_files_max=2))
    first, second, third = (BATCH.model_copy(update={"id": f"batch-{number:024x}", "created_s": float(number)}) for number in range(3))
    folder.add_batch(first)
    folder.add_batch(second)
    with pytest.raises(QueueFull):
        folder.add_batch(third)
    folder.finish(second.moved(BatchState.COMPLETED, 9.0))
    folder.add_batch(third)
    assert [each.id for each in folder.batches(BATCH.tenant)] == [third.id, first.id]
    assert folder.open_batches() == [(BATCH.tenant, first.id), (BATCH.tenant, third.id)]


def test_what_is_left_of_an_upload_goes_after_a_day(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    part = folder.begin_file(BATCH.tenant)
    part.write_bytes(b"half")
    folder.delete_expired(part.stat().st_mtime + 80_000.0)
    assert part.exists()
    folder.delete_expired(part.stat().st_mtime + 90_000.0)
    assert not part.exists()


async def test_a_damaged_batch_leaves_the_others_and_is_tried_again_later(tmp_path: Path) -> None:
    """Its record is no record; the other's input file is gone, which is said of it."""
    folder = folder_of(tmp_path)
    damaged = BATCH.model_copy(update={"id": "batch-" + "1" * 24})
    folder.add_batch(damaged)
    next(tmp_path.rglob(f"{damaged.id}.json")).write_text("{")
    driver = BatchDriver(folder, BatchSettings(), HttpSettings(), Nobody(), {}, lambda _result, _chat: {}, time.time)
    with capture_logs() as logs:
        running = asyncio.create_task(driver.run())
        async with asyncio.timeout(20.0):
            while folder.batch(BATCH.tenant, BATCH.id).state is not BatchState.FAILED:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.5 * POLL_S)
        running.cancel()
        await asyncio.wait([running])
    assert [each.code for each in folder.batch(BATCH.tenant, BATCH.id).errors] == ["invalid_file"]
    assert [each["batch"] for each in logs if each["event"] == "batch_failed"] == [damaged.id], "once in RETRY_MAX_S"
