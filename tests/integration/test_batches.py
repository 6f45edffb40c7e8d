"""Files and batches over HTTP: the official client, real gateways, a real server, one shared folder or bucket."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import openai
import pytest
from openai.types import Batch

from batch_places import PLACES, opened_place
from identity_files import add_key
from qlm_gateway.batches import records
from qlm_gateway.batches.folder import FolderObjects
from qlm_gateway.batches.store import BatchStore

from .gateway_rig import MODEL, PATIENCE_S, GatewayRun, Rig, until
from .http_rig import HTTP, chat_text, client_of

ENDED = ("completed", "failed", "expired", "cancelled")


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with opened_place(request.param, tmp_path / "files", monkeypatch) as opened:
        yield opened


def line_of(custom_id: str, **changes: Any) -> str:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Why?"}], "max_tokens": 6, **changes.pop("body", {})}
    return json.dumps({"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **changes})


def lines_of(count: int) -> bytes:
    return "\n".join(line_of(f"c{number}") for number in range(count)).encode()


async def gateway_of(rig: Rig, place: str, **settings: Any) -> GatewayRun:
    batches = {"folder": place, **settings.pop("batches", {})}
    return await rig.gateway(http=HTTP, batches=batches, **settings)


@asynccontextmanager
async def opened(rig: Rig, place: str, **settings: Any) -> AsyncIterator[openai.AsyncOpenAI]:
    gateway = await gateway_of(rig, place, **settings)
    async with client_of(gateway.gateway.http_url) as client:
        yield client


async def batch_of(client: openai.AsyncOpenAI, content: bytes, **fields: Any) -> Batch:
    file = await client.files.create(file=("input.jsonl", content), purpose="batch")
    values: dict[str, Any] = {"endpoint": "/v1/chat/completions", "completion_window": "1h", **fields}
    return await client.batches.create(input_file_id=file.id, **values)


async def ended(client: openai.AsyncOpenAI, batch_id: str) -> Batch:
    async with asyncio.timeout(PATIENCE_S):
        while (batch := await client.batches.retrieve(batch_id)).status not in ENDED:
            await asyncio.sleep(0.05)
    return batch


async def answers_of(client: openai.AsyncOpenAI, file_id: str | None) -> list[dict[str, Any]]:
    assert file_id is not None
    return [json.loads(line) for line in (await client.files.content(file_id)).content.splitlines()]


async def test_each_line_has_its_answer(rig: Rig, place: str) -> None:
    rig.serve()
    async with opened(rig, place) as client:
        content = b"\xef\xbb\xbf" + line_of("first").encode() + b"\r\n\r\n" + line_of("second", body={"max_tokens": 3}).encode()
        created = await batch_of(
            client, content, metadata={"run": "nightly"}, extra_body={"output_expires_after": {"anchor": "created_at", "seconds": 7200}}
        )
        assert (created.status, created.metadata) == ("validating", {"run": "nightly"})
        batch = await ended(client, created.id)
        assert batch.status == "completed"
        assert batch.request_counts is not None
        assert (batch.request_counts.total, batch.request_counts.completed, batch.request_counts.failed) == (2, 2, 0)
        answers = {each["custom_id"]: each for each in await answers_of(client, batch.output_file_id)}
        assert answers.keys() == {"first", "second"}
        for name, tokens in (("first", 6), ("second", 3)):
            response = answers[name]["response"]
            assert response["status_code"] == 200
            assert response["body"]["choices"][0]["message"]["content"] == chat_text(tokens)
            assert response["body"]["usage"]["completion_tokens"] == tokens
        assert batch.error_file_id is None
        assert [each.id async for each in client.batches.list()] == [batch.id]
        files = [each async for each in client.files.list()]
        assert {each.purpose for each in files} == {"batch", "batch_output"}
        output = next(each for each in files if each.id == batch.output_file_id)
        assert output.expires_at == pytest.approx(output.created_at + 7_200, abs=1)
        assert (await client.files.delete(output.id)).deleted
        with pytest.raises(openai.NotFoundError):
            await client.files.content(output.id)


TOOL = {"type": "function", "function": {"name": "f"}}
WRONG = (
    ("{", "invalid_json_line", None),
    ("[]", "invalid_json_line", None),
    (json.dumps({"method": "POST"}), "missing_required_parameter", "custom_id"),
    (line_of("a", method="GET"), "invalid_method", "method"),
    (line_of("b", url="/v1/completions"), "invalid_url", "url"),
    (line_of("c", body={"n": 2}), "invalid_request", "body.n"),
    (line_of("d", body={"stream": True}), "invalid_request", "body.stream"),
    (line_of("e", body={"max_tokens": 0}), "invalid_request", "body.max_tokens"),
    (line_of("f", body={"model": "another"}), "model_not_found", "body.model"),
    (line_of("g", body={"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "f"}}}), "invalid_request", "body.tools"),
    (line_of("twice"), "duplicate_custom_id", "custom_id"),
)


async def test_a_file_with_wrong_lines_fails_with_each_of_them(rig: Rig, place: str) -> None:
    rig.serve()
    async with opened(rig, place) as client:
        content = "\n".join([line_of("twice"), *(line for line, _, _ in WRONG)]).encode() + b'\n"\xff"'
        batch = await ended(client, (await batch_of(client, content)).id)
        assert batch.status == "failed"
        assert batch.errors is not None
        found = [(each.line, each.code, each.param) for each in batch.errors.data or ()]
        assert found == [
            *((number, code, param) for number, (_, code, param) in enumerate(WRONG, start=2)),
            (len(WRONG) + 2, "invalid_json_line", None),
        ]
        assert await rig.queue.overview() is not None
        empty = await ended(client, (await batch_of(client, b"\n\n")).id)
        assert empty.errors is not None
        assert [each.code for each in empty.errors.data or ()] == ["empty_file"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "2d"}, "completion_window"),
        ({"metadata": {"k" * 65: ""}}, "metadata"),
    ],
)
async def test_a_batch_of_wrong_fields_is_refused(rig: Rig, place: str, fields: dict[str, Any], param: str) -> None:
    async with opened(rig, place) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await batch_of(client, lines_of(1), **fields)
        assert refused.value.param == param


async def test_files_and_lines_have_bounds(rig: Rig, place: str) -> None:
    bounds = {"file_bytes_max": 2_000, "tenant_bytes_max": 3_000, "lines_max": 5}
    async with opened(rig, place, batches=bounds) as client:
        with pytest.raises(openai.APIStatusError) as large:
            await client.files.create(file=("a", b"x" * 2_001), purpose="batch")
        assert large.value.status_code == 413
        batch = await ended(client, (await batch_of(client, lines_of(6))).id)
        assert batch.errors is not None
        assert [each.code for each in batch.errors.data or ()] == ["too_many_tasks"]
        await client.files.create(file=("a", b"x" * 1_900), purpose="batch")
        with pytest.raises(openai.RateLimitError):
            await client.files.create(file=("b", b"x" * 1_900), purpose="batch")
        with pytest.raises(openai.BadRequestError) as purpose:
            await client.files.create(file=("b", b"x"), purpose="fine-tune")
        assert purpose.value.param == "purpose"


async def test_another_gateway_continues_and_no_line_is_answered_twice(rig: Rig, place: str) -> None:
    bounds = {"in_flight_max": 16}
    first, second = [await gateway_of(rig, place, batches=bounds) for _ in range(2)]
    async with client_of(first.gateway.http_url) as client:
        created = await batch_of(client, lines_of(100))
        serving = asyncio.create_task(rig.agent.run(0.05))
        async with asyncio.timeout(PATIENCE_S):
            while not (batch := await client.batches.retrieve(created.id)).request_counts or batch.request_counts.completed < 10:
                await asyncio.sleep(0.02)
        serving.cancel()
        async with asyncio.timeout(PATIENCE_S):  # until some are under way
            while not (await rig.queue.overview()).live:
                await asyncio.sleep(0.02)
    await first.kill()
    rig.serve()
    async with client_of(second.gateway.http_url) as client:
        batch = await ended(client, created.id)
        assert batch.status == "completed"
        answers = await answers_of(client, batch.output_file_id)
        assert sorted(each["custom_id"] for each in answers) == sorted(f"c{number}" for number in range(100))
    assert (await rig.queue.overview()).accepted_count == 100


async def test_a_cancelled_batch_keeps_its_answers(rig: Rig, place: str) -> None:
    async with opened(rig, place, batches={"in_flight_max": 8}) as client:
        created = await batch_of(client, lines_of(50))
        serving = asyncio.create_task(rig.agent.run(0.05))
        async with asyncio.timeout(PATIENCE_S):
            while not (batch := await client.batches.retrieve(created.id)).request_counts or batch.request_counts.completed < 4:
                await asyncio.sleep(0.02)
        serving.cancel()
        with pytest.raises(openai.ConflictError):
            await client.files.delete(created.input_file_id)
        assert (await client.batches.cancel(created.id)).status == "cancelling"
        batch = await ended(client, created.id)
        assert batch.status == "cancelled"
        assert batch.request_counts is not None
        assert len(await answers_of(client, batch.output_file_id)) == batch.request_counts.completed < 50
        with pytest.raises(openai.ConflictError):
            await client.batches.cancel(created.id)
        assert (await rig.queue.overview()).live == 0, "those that waited are cancelled"


async def test_a_line_whose_request_is_deleted_ends_as_cancelled(rig: Rig, place: str) -> None:
    async with opened(rig, place) as client:
        created = await batch_of(client, lines_of(2))
        async with asyncio.timeout(PATIENCE_S):
            while len(live := (await rig.queue.live_requests("", 10)).requests) < 2 or not all(each.gateway for each in live):
                await asyncio.sleep(0.02)
        await client.delete(f"/requests/{live[0].key.request_id}", cast_to=object)
        rig.serve()
        batch = await ended(client, created.id)
        assert batch.request_counts is not None
        assert (batch.status, batch.request_counts.completed, batch.request_counts.failed) == ("completed", 1, 1)
        assert [each["error"]["code"] for each in await answers_of(client, batch.error_file_id)] == ["cancelled"]
    assert (await rig.queue.overview()).accepted_count == 2, "it does not run again"


async def test_lines_that_are_not_answered_in_time_expire(rig: Rig, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(records.WINDOWS_S, "15m", 2.0)
    async with opened(rig, place, batches={"in_flight_max": 2}) as client:
        batch = await ended(client, (await batch_of(client, lines_of(5), completion_window="15m")).id)
        assert batch.status == "expired"
        errors = await answers_of(client, batch.error_file_id)
        assert {each["error"]["code"] for each in errors} <= {"batch_expired", "expired"}
        assert sorted(each["custom_id"] for each in errors) == [f"c{number}" for number in range(5)]


async def test_the_input_of_a_batch_can_be_deleted_from_its_end_on(rig: Rig, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its driver closes it some time after."""
    monkeypatch.setattr(BatchStore, "close", lambda *_: None)
    async with opened(rig, place) as client:
        created = await batch_of(client, b"wrong")
        assert (await ended(client, created.id)).status == "failed"
        assert (await client.files.delete(created.input_file_id)).deleted


async def test_tenants_do_not_see_each_other(rig: Rig, place: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"
    acme, other, poor = add_key(keys, "acme"), add_key(keys, "other"), add_key(keys, "poor", models=("another",), slo_s_min=7_200.0)
    gateway = await gateway_of(rig, place, security={"key_file": str(keys)})

    def client(key: str) -> openai.AsyncOpenAI:
        return openai.AsyncOpenAI(base_url=f"{gateway.gateway.http_url}/v1", api_key=key, max_retries=0, timeout=PATIENCE_S)

    rig.serve()
    async with client(acme) as own, client(other) as stranger, client(poor) as limited:
        batch = await ended(own, (await batch_of(own, lines_of(1))).id)
        assert batch.status == "completed"
        for call in (
            stranger.files.retrieve(batch.input_file_id),
            stranger.batches.retrieve(batch.id),
            stranger.files.content(batch.output_file_id or ""),
        ):
            with pytest.raises(openai.NotFoundError):
                await call
        assert await _ids(stranger.batches.list()) == []
        with pytest.raises(openai.PermissionDeniedError) as refused:
            await batch_of(limited, lines_of(1))
        assert refused.value.param == "completion_window"
        failed = await ended(limited, (await batch_of(limited, lines_of(1), completion_window="24h")).id)
        assert failed.errors is not None
        assert [each.code for each in failed.errors.data or ()] == ["model_not_found"]
    for path in ("../x", "file-" + "0" * 24, "batch-" + "0" * 24 + "/../"):
        async with client(acme) as own:
            with pytest.raises(openai.NotFoundError):
                await own.files.retrieve(path)


async def _ids(pages: Any) -> Sequence[str]:
    return [each.id async for each in pages]


@pytest.mark.parametrize("name", ["open", "begin"])
async def test_a_call_that_leaves_while_its_file_is_opened_leaves_none_open(
    rig: Rig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Neither a download, nor the part of an upload."""
    opens = getattr(FolderObjects, name)
    held: list[Any] = []
    entered, released = threading.Event(), threading.Event()

    def opens_late(*arguments: Any) -> Any:
        entered.set()
        assert released.wait(PATIENCE_S)
        held.append(opens(*arguments))
        return held[-1]

    async with opened(rig, str(tmp_path / "files")) as client:
        file = await client.files.create(file=("input.jsonl", lines_of(1)), purpose="batch")
        monkeypatch.setattr(FolderObjects, name, opens_late)
        if name == "open":
            calling: asyncio.Future[Any] = asyncio.ensure_future(client.files.content(file.id))
        else:
            calling = asyncio.ensure_future(client.files.create(file=("more.jsonl", lines_of(1)), purpose="batch"))
        assert await asyncio.to_thread(entered.wait, PATIENCE_S)
        calling.cancel()
        with pytest.raises(asyncio.CancelledError):
            await calling
        await until(lambda: any(task.cancelling() for task in asyncio.all_tasks()), "the end of the call reaches the gateway")
        released.set()
        await until(lambda: held and getattr(held[0], "_file", held[0]).closed, "the file is closed")
    assert not list((tmp_path / "files").rglob(".*"))


async def test_a_file_that_cannot_be_opened_is_503(rig: Rig, tmp_path: Path) -> None:
    async with opened(rig, str(tmp_path / "files")) as client:
        file = await client.files.create(file=("input.jsonl", lines_of(1)), purpose="batch")
        (path,) = (tmp_path / "files").rglob(f"{file.id}.data")
        path.unlink()
        path.mkdir()
        with pytest.raises(openai.InternalServerError) as refused:
            await client.files.content(file.id)
        assert (refused.value.status_code, refused.value.code) == (503, "queue_unavailable")


@pytest.mark.parametrize(
    ("kind", "body"),
    [
        ("multipart/form-data", b"x"),
        ("multipart/form-data; boundary=b", b""),
        ("multipart/form-data; boundary=b", b"no boundary"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="a\x10"\r\n\r\nx\r\n--b--\r\n'),
        ("multipart/form-data; boundary=b", b"--b\r\nX: " + b"x" * 20_000 + b"\r\n\r\nx\r\n--b--\r\n"),
        ("multipart/form-data; boundary=b", b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b--\r\n'),
    ],
)
async def test_an_upload_that_is_no_form_with_a_file_is_400(rig: Rig, tmp_path: Path, kind: str, body: bytes) -> None:
    gateway = await gateway_of(rig, str(tmp_path / "files"))
    async with aiohttp.ClientSession(gateway.gateway.http_url) as session:
        async with session.post("/v1/files", data=body, headers={"Content-Type": kind}) as answer:
            assert (answer.status, (await answer.json())["error"]["param"]) == (400, "file")
        async with session.get("/v1/files") as answer:
            assert (await answer.json())["data"] == []
