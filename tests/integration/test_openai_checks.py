"""openai-python's own checks of what it is sent (`_strict_response_validation`), over every route that it knows."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import openai
import pytest
from openai.types import Batch, Completion

import qlm_gateway.front.http
from qlm_cli.reference.openapi import document

from .gateway_rig import MODEL, PATIENCE_S, Rig
from .http_rig import CHAT, HTTP, USAGE
from .test_batches import ENDED, lines_of

SCHEMA = {"type": "json_schema", "json_schema": {"name": "s", "schema": {"type": "object"}}}
ROUTES = {path: tuple(calls) for path, calls in document()["paths"].items()}


@pytest.fixture
async def strict(rig: Rig, tmp_path: Path) -> AsyncIterator[openai.AsyncOpenAI]:
    """A client that raises APIResponseValidationError for an answer that is not of its type."""
    rig.serve()
    gateway = await rig.gateway(http=HTTP, batches={"folder": str(tmp_path / "files")})
    url = f"{gateway.gateway.http_url}/v1"
    async with openai.AsyncOpenAI(
        base_url=url, api_key="none", max_retries=0, timeout=PATIENCE_S, _strict_response_validation=True
    ) as client:
        yield client


async def all_of(stream: Awaitable[Any]) -> list[Any]:
    return [each async for each in await stream]


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"n": 2, "seed": 1},
        {"logprobs": True, "top_logprobs": 2},
        {"service_tier": "priority"},
        {"service_tier": "flex", "stop": ["nothing"]},
        {"response_format": SCHEMA},
        {"messages": [{"role": "user", "content": [{"type": "text", "text": "Why?"}]}]},
        {"extra_headers": {"x-qlm-slo-seconds": "20", "Idempotency-Key": "named"}},
    ],
)
async def test_chats_and_their_streams(strict: openai.AsyncOpenAI, fields: dict[str, Any]) -> None:
    call = {**CHAT, **fields}
    answer = await strict.chat.completions.create(**call)
    assert len(answer.choices) == call.get("n", 1)
    chunks = await all_of(strict.chat.completions.create(**call, **USAGE))
    assert chunks[-1].usage == answer.usage


@pytest.mark.parametrize("fields", [{}, {"prompt": ["a", "bb"]}, {"prompt": [5, 6]}, {"logprobs": 2}, {"n": 2, "seed": 3}])
async def test_completions_and_their_streams(strict: openai.AsyncOpenAI, fields: dict[str, Any]) -> None:
    """The client's type has no null for the `finish_reason` of a chunk, which OpenAI's own API sends before the last."""
    call: dict[str, Any] = {"model": MODEL, "prompt": "Why?", "max_tokens": 4, **fields}
    answer = await strict.completions.create(**call)
    lax = openai.AsyncOpenAI(base_url=strict.base_url, api_key="none", timeout=PATIENCE_S)
    async with lax:
        chunks = [chunk.model_dump(exclude_unset=True) for chunk in await all_of(lax.completions.create(**call, **USAGE))]
    for chunk in chunks:
        for choice in chunk["choices"]:
            choice["finish_reason"] = choice["finish_reason"] or "length"
        Completion.model_validate(chunk, strict=True)
    assert answer.usage is not None
    assert chunks[-1]["usage"] == answer.usage.model_dump(exclude_unset=True)


@pytest.mark.parametrize("fields", [{}, {"instructions": "Be brief."}, {"metadata": {"a": "b"}, "temperature": 0.5}])
async def test_responses_and_their_events(strict: openai.AsyncOpenAI, fields: dict[str, Any]) -> None:
    call: dict[str, Any] = {"model": MODEL, "input": "Why?", "max_output_tokens": 6, **fields}
    answer = await strict.responses.create(**call)
    assert answer.output_text
    events = await all_of(strict.responses.create(**call, stream=True))
    assert events[-1].response.output_text == answer.output_text
    queued = await strict.responses.create(**call, background=True)
    async with asyncio.timeout(PATIENCE_S):
        while (found := await strict.responses.retrieve(queued.id)).status in ("queued", "in_progress"):
            await asyncio.sleep(0.01)
    assert found.output_text == answer.output_text


async def test_models(strict: openai.AsyncOpenAI) -> None:
    assert [model.id async for model in strict.models.list()] == [MODEL]
    assert (await strict.models.retrieve(MODEL)).id == MODEL


async def test_files_and_batches(strict: openai.AsyncOpenAI) -> None:
    after: Any = {"anchor": "created_at", "seconds": 3600}
    file = await strict.files.create(file=("input.jsonl", lines_of(2)), purpose="batch", expires_after=after)
    assert [each.id async for each in strict.files.list(purpose="batch")] == [file.id]
    assert (await strict.files.retrieve(file.id)).bytes == len(lines_of(2))
    assert (await strict.files.content(file.id)).content == lines_of(2)

    async def batch() -> Batch:
        return await strict.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"a": "b"}, output_expires_after=after
        )

    async def ended(batch_id: str) -> Batch:
        async with asyncio.timeout(PATIENCE_S):
            while (found := await strict.batches.retrieve(batch_id)).status not in ENDED:
                await asyncio.sleep(0.05)
        return found

    done = await ended((await batch()).id)
    assert done.request_counts is not None
    assert done.request_counts.completed == 2
    assert (await strict.files.retrieve(done.output_file_id or "")).purpose == "batch_output"
    cancelled = await strict.batches.cancel((await batch()).id)
    assert cancelled.status in ("cancelling", "cancelled")
    assert {each.id async for each in strict.batches.list(limit=1)} == {done.id, (await ended(cancelled.id)).id}
    assert (await strict.files.delete(file.id)).deleted


@pytest.mark.parametrize(
    ("call", "kind"),
    [
        (lambda client: client.chat.completions.create(**{**CHAT, "model": "none"}), openai.NotFoundError),
        (lambda client: client.chat.completions.create(**{**CHAT, "temperature": 3}), openai.BadRequestError),
        (lambda client: client.responses.retrieve("none"), openai.NotFoundError),
        (lambda client: client.files.retrieve("file-none"), openai.NotFoundError),
        (lambda client: client.batches.cancel("batch-none"), openai.NotFoundError),
    ],
)
async def test_errors_are_of_the_clients_classes(
    strict: openai.AsyncOpenAI, call: Callable[[openai.AsyncOpenAI], Awaitable[Any]], kind: type[openai.APIStatusError]
) -> None:
    with pytest.raises(kind) as raised:
        await call(strict)
    assert raised.value.code
    assert raised.value.type == "invalid_request_error"


async def test_a_wrong_answer_would_be_found(strict: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("qlm_gateway.front.http.answers.finish_reason", lambda _: "because")
    monkeypatch.setattr("qlm_gateway.front.http.collected_choice.finish_reason", lambda _: "because")
    with pytest.raises(openai.APIResponseValidationError):
        await strict.chat.completions.create(**CHAT)


def test_the_document_of_the_api_has_every_route() -> None:
    folder = Path(qlm_gateway.front.http.__path__[0])
    served = {
        (path.replace(":.+", ""), method)
        for file in folder.rglob("*.py")
        for method, path in re.findall(r"""web\.(get|post|delete)\(["'](/[^"']+)["']""", file.read_text())
    }
    documented = {(path, method) for path, calls in ROUTES.items() for method in calls}
    assert {each for each in served if not each[0].startswith(("/page", "/metrics"))} == documented
