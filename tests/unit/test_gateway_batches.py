"""Lines of batches, and batches that cannot be driven."""

from __future__ import annotations

import asyncio
import json
import threading
import time
import tracemalloc
from io import BytesIO
from pathlib import Path
from typing import NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from structlog.testing import capture_logs

from qlm.api.v1.request_pb2 import Request
from qlm_core.vocabulary.request import RequestKey
from qlm_gateway.batches.driver import POLL_S, BatchDriver
from qlm_gateway.batches.lines import ERRORS_MAX, check_file, read_lines
from qlm_gateway.batches.objects import open_objects
from qlm_gateway.batches.records import BatchRecord, BatchState
from qlm_gateway.batches.settings import BatchSettings
from qlm_gateway.batches.store import BatchStore
from qlm_gateway.front.http.settings import HttpSettings

BATCH = BatchRecord(
    id="batch-" + "0" * 24, tenant="a/../b", input_file_id="file-" + "0" * 24, endpoint="/v1/completions", window="1h", created_s=0.0
)
PART = st.sampled_from([b"\n", b"\r\n", b"{", b"}", b'"custom_id"', b":", b'"a"', b",", b"[", b"\xef\xbb\xbf", b"\x00", b"1e999", b"null"])


class Nobody:
    """A queue that receives no call."""

    async def submit(self, request: Request) -> NoReturn:
        raise AssertionError("no line is sent")

    async def end_of(self, key: RequestKey, wait_s: float) -> NoReturn:
        raise AssertionError("no end is waited for")

    async def cancel(self, key: RequestKey) -> NoReturn:
        raise AssertionError("nothing is cancelled")


@settings(max_examples=150)
@given(content=st.lists(PART | st.binary(max_size=6), max_size=30).map(b"".join))
def test_whatever_a_file_holds_is_counted_or_reported(content: bytes) -> None:
    total, errors = check_file(BytesIO(content), "/v1/completions", HttpSettings(), 10, ["m"])
    assert errors, "none of these is a request"
    assert total >= len(errors) - 1
    assert all(each.line is None or 1 <= each.line <= content.count(b"\n") + 1 for each in errors)


def test_long_lines_are_read_in_part_and_many_errors_end_the_reading() -> None:
    assert list(read_lines(BytesIO(b"x" * 50 + b"\n" + b"y\n"), 10)) == [(1, b"x" * 11), (2, b"y")]
    assert len(check_file(BytesIO(b"{\n" * 1_000), "/v1/completions", HttpSettings(), 5_000, ["m"])[1]) == ERRORS_MAX


async def test_a_damaged_batch_leaves_the_others_and_is_tried_again_later(tmp_path: Path) -> None:
    """Its record is no record; the other's input file is gone, which is said of it."""
    store = BatchStore(open_objects(str(tmp_path)), BatchSettings())
    store.add_batch(BATCH)
    damaged = BATCH.model_copy(update={"id": "batch-" + "1" * 24})
    store.add_batch(damaged)
    next(tmp_path.rglob(f"{damaged.id}.json")).write_text("{")
    driver = BatchDriver(store, BatchSettings(), HttpSettings(), Nobody(), {}, lambda _result, _chat: {}, time.time)
    with capture_logs() as logs:
        running = asyncio.create_task(driver.run())
        async with asyncio.timeout(20.0):
            while store.batch(BATCH.tenant, BATCH.id).state is not BatchState.FAILED:
                await asyncio.sleep(0.05)
        await asyncio.sleep(1.5 * POLL_S)
        running.cancel()
        await asyncio.wait([running])
    assert [each.code for each in store.batch(BATCH.tenant, BATCH.id).errors] == ["invalid_file"]
    assert [each["batch"] for each in logs if each["event"] == "batch_failed"] == [damaged.id], "once in RETRY_MAX_S"


def test_a_file_of_the_largest_size_is_checked_within_little_memory(tmp_path: Path) -> None:
    bounds, path = BatchSettings(), tmp_path / "largest.jsonl"
    bytes_a_line = bounds.file_bytes_max // bounds.lines_max
    with path.open("wb") as file:
        for number in range(bounds.lines_max):
            body = {"model": "m", "prompt": "x"}
            line = {"custom_id": f"c{number}", "method": "POST", "url": "/v1/completions", "body": body}
            body["prompt"] = "x" * (bytes_a_line - len(json.dumps(line)))
            file.write(json.dumps(line).encode() + b"\n")
    assert 0.99 < path.stat().st_size / bounds.file_bytes_max <= 1.0
    tracemalloc.start()
    try:
        with path.open("rb") as file:
            assert check_file(file, "/v1/completions", HttpSettings(), bounds.lines_max, ["m"]) == (bounds.lines_max, [])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 32 << 20


async def test_who_is_cancelled_waits_for_the_end_of_its_call(tmp_path: Path) -> None:
    """So nothing that a thread still uses is closed."""
    store, began, go_on = BatchStore(open_objects(str(tmp_path)), BatchSettings()), threading.Event(), threading.Event()
    ended = list[bool]()

    def work() -> None:
        began.set()
        ended.append(go_on.wait(20.0))

    caller = asyncio.create_task(store.do(work))
    await asyncio.to_thread(began.wait, 20.0)
    caller.cancel()
    await asyncio.wait([caller], timeout=0.05)
    assert not caller.done()
    go_on.set()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert ended == [True]
