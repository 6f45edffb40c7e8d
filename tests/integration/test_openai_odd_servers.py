"""The openai engine on servers that say the same as vLLM's in other words, and on some that say nonsense."""

from __future__ import annotations

import asyncio
import json
import socket
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import ExitStack

import pytest
from aiohttp import web

from qlm_agent.engines.openai import run as run_module
from qlm_agent.engines.openai.build import openai_engine
from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.openai.errors import ServerFull
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.openai.settings import OpenAiSettings
from qlm_agent.engines.port import (
    EngineOutput,
    EngineRequest,
    FailureKind,
    FinishReason,
    ModelLoadFailed,
    Prompt,
    Sampling,
    TextPrompt,
    Tier,
)
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.model import ModelSpec

DEADLINE_S = 60.0
Start = Callable[..., Awaitable[OpenAiEngine]]


class OddServer:
    """Answers completions with `body`, in this loop. `statuses`: of its next answers about its models; `busy`: how many calls about tokens
    it is too busy for; `holds`: whether its streams have no end, but comments; `late_s`: between a first comment and what follows.
    Its token 0 is an "a"."""

    def __init__(self) -> None:
        self.body = b""
        self.statuses: list[int] = []
        self.ids: list[object] = ["m"]
        self.busy = 0
        self.holds = False
        self.late_s = 0.0
        self.reports_ids = True
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> OddServer:
        app = web.Application()
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/completions", self._completions)])
        app.add_routes([web.post("/v1/chat/completions", self._completions)])
        app.add_routes([web.post("/tokenize", self._tokenize), web.post("/detokenize", self._detokenize)])
        self._runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def stop(self) -> None:
        assert self._runner is not None
        await self._runner.cleanup()

    def says(self, *chunks: object) -> None:
        """These events and the end of the stream."""
        self.body = b"".join(f"data: {json.dumps(chunk)}\n\n".encode() for chunk in chunks) + b"data: [DONE]\n\n"

    async def _models(self, request: web.Request) -> web.StreamResponse:
        return web.json_response({"data": [{"id": each} for each in self.ids]}, status=self.statuses.pop(0) if self.statuses else 200)

    async def _tokenize(self, request: web.Request) -> web.StreamResponse:
        return self._busy() or web.json_response({"tokens": [1, 2]})

    async def _detokenize(self, request: web.Request) -> web.StreamResponse:
        ids = (await request.json())["tokens"]
        return self._busy() or web.json_response({"prompt": "".join(chr(ord("a") + token) for token in ids)})

    def _busy(self) -> web.StreamResponse | None:
        """Or none, where its turn to be so is over."""
        self.busy -= 1
        return web.json_response({"error": {"message": "overloaded"}}, status=503) if self.busy >= 0 else None

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        if not (await request.json()).get("stream"):
            return web.json_response({"choices": [{"text": "a", **({"token_ids": [0]} if self.reports_ids else {})}]})
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        if self.late_s:
            await response.write(b": wait\n\n")
            await asyncio.sleep(self.late_s)
        await response.write(self.body)
        while self.holds:
            await asyncio.sleep(0.05)
            await response.write(b": wait\n\n")
        return response


@pytest.fixture
async def server() -> AsyncIterator[OddServer]:
    server = await OddServer().start()
    yield server
    await server.stop()


@pytest.fixture
async def start(server: OddServer) -> AsyncIterator[Start]:
    """Starts an engine with these settings; it is stopped after the test."""
    started: list[OpenAiEngine] = []

    async def start(*, loads: bool = True, **settings: object) -> OpenAiEngine:
        values = {"base_url": server.url, "output": "text", "poll_s": 0.05, "tell_every_s": 0.001, **settings}
        specs = {"m": ModelSpec(name="m", profile="Mistral-7B", context_tokens_max=2048)}
        engine = openai_engine(OpenAiSettings.model_validate(values), specs, {"m": 10_000}, 32)
        started.append(engine)
        await engine.start()
        if loads:
            await engine.load_model("m", Tier.ACTIVE)
        return engine

    yield start
    for engine in started:
        await engine.stop()


@pytest.fixture
async def engine(start: Start) -> OpenAiEngine:
    return await start()


async def answer(engine: OpenAiEngine, *, stop: tuple[str, ...] = (), prompt: Prompt | None = None) -> tuple[str, EngineOutput]:
    """The text (or the tokens as text) of a run and its last output."""
    prompt = prompt or TextPrompt(text="say something")
    await engine.add(
        EngineRequest(run_id="r", model="m", prompt=prompt, prompt_tokens=2, output_tokens_max=100, sampling=Sampling(stop=stop))
    )
    text = ""
    async with asyncio.timeout(DEADLINE_S):
        while True:
            for output in await engine.outputs():
                text += "".join(output.pieces) + "".join(chr(ord("a") + token) for token in array("I", output.token_ids))
                if output.finish is not None or output.failure is not None:
                    return text, output


def words(*texts: object, finish: Sequence[object]) -> list[dict[str, object]]:
    """Chunks of these texts with these finish reasons."""
    return [{"choices": [{"index": 0, "text": text, "finish_reason": reason}]} for text, reason in zip(texts, finish, strict=True)]


SAID_OTHERWISE: dict[str, tuple[list[dict[str, object]], str]] = {
    "no reason yet is an empty one, as Text Generation Inference streams": (
        words("one", " two", " three", finish=["", "", "eos_token"]),
        "one two three",
    ),
    "null for the last text": (words("one", None, " two", None, finish=[None, None, None, "stop"]), "one two"),
    "no last text": ([*words("one", " two", finish=[None, None]), {"choices": [{"index": 0, "finish_reason": "stop"}]}], "one two"),
    "an error that is null": ([{**chunk, "error": None} for chunk in words("one", " two", finish=[None, "stop"])], "one two"),
}


@pytest.mark.parametrize(("chunks", "said"), SAID_OTHERWISE.values(), ids=SAID_OTHERWISE)
async def test_the_same_in_other_words(server: OddServer, engine: OpenAiEngine, chunks: list[dict[str, object]], said: str) -> None:
    server.says(*chunks)
    text, end = await answer(engine)
    assert (text, end.finish, end.failure) == (said, FinishReason.STOP, None)


USAGES: list[tuple[object, int | None]] = [
    ({"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 10}}, 1),
    ({"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 0}}, 0),
    ({"prompt_tokens": 20, "prompt_tokens_details": None}, None),
    ({"prompt_tokens": 20, "prompt_tokens_details": {"cached_tokens": 21}}, None),
    ({"prompt_tokens": 0, "prompt_tokens_details": {"cached_tokens": 0}}, None),
    ([], None),
]
"""Usages, and what of the two tokens of a prompt was cached then."""


@pytest.mark.parametrize(("usage", "cached_tokens"), USAGES)
async def test_the_usage_reports_cached_tokens(server: OddServer, engine: OpenAiEngine, usage: object, cached_tokens: int | None) -> None:
    server.says(*words("one", finish=["stop"]), {"choices": [], "usage": usage})
    text, end = await answer(engine)
    assert (text, end.finish, end.cached_tokens) == ("one", FinishReason.STOP, cached_tokens)


@pytest.mark.parametrize("holds", [True, False])
async def test_an_answer_is_whole_where_nothing_follows_it(server: OddServer, start: Start, holds: bool) -> None:
    """Neither a usage nor the end of the stream: only comments, or a connection that breaks."""
    engine = await start()
    server.says(*words("one", finish=["stop"]))
    server.body, server.holds = server.body.removesuffix(b"data: [DONE]\n\n"), holds
    text, end = await answer(engine)
    assert (text, end.finish, end.failure, end.cached_tokens) == ("one", FinishReason.STOP, None, None)


async def test_the_chunks_of_a_chat_are_no_text(server: OddServer, engine: OpenAiEngine) -> None:
    server.says({"choices": [{"delta": {"content": "one"}, "finish_reason": None}]}, {"choices": [{"delta": {}, "finish_reason": "stop"}]})
    text, end = await answer(engine)
    assert text == ""
    assert end.failure is not None
    assert (end.failure.kind, "without text" in end.failure.message) == (FailureKind.BROKEN, True)


async def test_half_a_character_is_no_reason_to_fail(server: OddServer, engine: OpenAiEngine) -> None:
    """Servers that count in UTF-16 may cut an emoji in two; neither half can be stored, or sent to anybody."""
    server.says(*words("a \ud83d", "\ude00 b", "\ude00", finish=[None, None, "stop"]))
    text, end = await answer(engine)
    assert (text.encode().decode(), end.finish) == ("a 😀 b�", FinishReason.STOP)


async def test_a_load_that_finds_the_server_gone_again_leaves_no_model_active(server: OddServer, start: Start) -> None:
    """It was down, answers once, and is down: nobody would report that the model is lost, since nothing changed."""
    server.statuses = [500, 200, 500]
    engine = await start(loads=False, poll_s=600.0)
    async with asyncio.timeout(DEADLINE_S):
        while len(server.statuses) > 2:
            await engine.outputs()
    with pytest.raises(ModelLoadFailed, match="became unreachable"):
        await engine.load_model("m", Tier.ACTIVE)
    assert engine.stats().active_model == ""
    await engine.load_model("m", Tier.ACTIVE)
    assert engine.stats().active_model == "m"


@pytest.mark.parametrize("stop", [(), ("cd",)], ids=["prompt", "stop"])
async def test_a_server_too_busy_for_calls_about_tokens_is_called_again(
    server: OddServer, start: Start, stop: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_module, "RETRY_MAX_S", 0.001)
    engine = await start(output="tokens")
    chunk = {"text": "abcd", "token_ids": [0, 1, 2, 3], "finish_reason": "length"}
    server.says({"choices": [chunk]})
    server.busy = 2
    if stop:
        monkeypatch.setattr(OpenAiServer, "tokenize", lambda server, body: asyncio.sleep(0.0, [1, 2]))
    text, end = await answer(engine, stop=stop)
    assert end.failure is None, end.failure
    assert text == ("ab" if stop else "abcd")


async def test_a_server_that_limits_the_rate_of_calls_is_there(server: OddServer, engine: OpenAiEngine) -> None:
    server.statuses = [429] * 3
    async with asyncio.timeout(DEADLINE_S):
        while server.statuses:
            await asyncio.sleep(0.01)
    assert engine.stats().active_model == "m"
    server.says(*words("one", finish=["stop"]))
    assert (await answer(engine))[0] == "one"


async def test_streams_leave_connections_for_other_calls(server: OddServer, start: Start) -> None:
    """The one stream that there may be needs the text of a token before it can end."""
    engine = await start(output="tokens", connections_max=1, call_timeout_s=1.0)
    server.says({"choices": [{"text": "abcd", "token_ids": [0, 1, 2, 3], "finish_reason": None}]})
    server.holds = True
    text, end = await answer(engine, stop=("cd",))
    assert (text, end.finish, end.failure) == ("ab", FinishReason.STOP, None)
    assert engine.stats().active_model == "m"


@pytest.mark.parametrize("reason", ["timeout", "cancelled"])
async def test_an_answer_that_the_server_gave_up_is_not_whole(server: OddServer, engine: OpenAiEngine, reason: str) -> None:
    """TensorRT-LLM's words for it."""
    server.says(*words("one", "", finish=[None, reason]))
    text, end = await answer(engine)
    assert end.failure is not None
    assert (text, end.failure.kind, reason in end.failure.message) == ("one", FailureKind.BROKEN, True)


@pytest.mark.parametrize(
    "body",
    [
        b'{"error": {"message": "out of memory"}}',
        b'data: {"choices": [{"text": "one", "finish_reason": null}]}\n\n{"error": {"message": "out of memory"}}\n',
        b'event: error\nerror: {"message": "out of memory"}\n\n',
    ],
    ids=["instead", "within", "field"],
)
async def test_an_error_that_is_no_event_is_reported(server: OddServer, engine: OpenAiEngine, body: bytes) -> None:
    """Ollama and LM Studio answer so with status 200, older llama.cpp in a field of its own."""
    server.body = body
    _, end = await answer(engine)
    assert end.failure is not None
    assert (end.failure.kind, "out of memory" in end.failure.message) == (FailureKind.BROKEN, True), end.failure


@pytest.mark.parametrize(("late_s", "ends"), [(1.0, FinishReason.STOP), (0.0, None)], ids=["before", "after"])
async def test_comments_are_no_tokens(server: OddServer, start: Start, late_s: float, ends: FinishReason | None) -> None:
    """They keep connections open: one before the first token does not make a request that waits there count as stalled, and those of a
    server that hangs do not keep its run."""
    engine = await start(stall_timeout_s=0.3)
    server.late_s, server.holds = late_s, ends is None
    server.says(*words("one", finish=["stop" if ends else None]))
    if not ends:
        server.body = server.body.removesuffix(b"data: [DONE]\n\n")
    text, end = await answer(engine)
    assert (text, end.finish) == ("one", ends)
    assert end.failure is None or "silent" in end.failure.message


async def test_a_server_that_reports_no_token_ids_has_no_model_that_reports_them(server: OddServer, start: Start) -> None:
    """Or each request would be pulled, and failed for good."""
    server.reports_ids = False
    engine = await start(loads=False, output="tokens")
    with pytest.raises(ModelLoadFailed, match=r"returns no token ids: it needs vLLM >= 0\.10\.2, or agent\.openai\.output=text"):
        await engine.load_model("m", Tier.ACTIVE)
    assert engine.stats().active_model == ""
    server.reports_ids = True
    await engine.load_model("m", Tier.ACTIVE)
    assert engine.stats().active_model == "m"


@pytest.mark.parametrize("ids", [[7], [None], [["m"]]], ids=repr)
async def test_names_that_are_none_fail_the_load(server: OddServer, start: Start, ids: list[object]) -> None:
    server.ids = ids
    engine = await start(loads=False)
    with pytest.raises(ModelLoadFailed, match="no list of models"):
        await engine.load_model("m", Tier.ACTIVE)


async def test_a_server_that_takes_no_connection_may_take_one_soon() -> None:
    with ExitStack() as sockets:
        full = sockets.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        clients = [sockets.enter_context(socket.socket()) for _ in range(4)]
        for client in clients:
            client.setblocking(False)
            client.connect_ex(full.getsockname())
        server = OpenAiServer(f"http://127.0.0.1:{full.getsockname()[1]}", "", OpenAiSettings(connect_timeout_s=0.2))
        await server.open()
        for call in (server.models(), anext(server.stream("/v1/completions", {}))):
            with pytest.raises(ServerFull, match=r"no connection within 0\.2 s") as full_error:
                await call
            assert full_error.value.passing
        await server.close()


async def test_chunks_of_a_chat_without_content_are_no_fault(server: OddServer, engine: OpenAiEngine) -> None:
    deltas: list[object] = [{"role": "assistant", "content": ""}, {"reasoning_content": "hm"}, {"content": None}, {"content": "yes"}, {}]
    server.says(*({"choices": [{"delta": delta, "finish_reason": "stop" if delta == {} else None}]} for delta in deltas))
    text, end = await answer(engine, prompt=ChatPrompt(messages=({"role": "user", "content": "say something"},)))
    assert (text, end.finish) == ("yes", FinishReason.STOP)


async def test_events_may_begin_with_a_byte_order_mark(server: OddServer, engine: OpenAiEngine) -> None:
    server.says(*words("one", " two", finish=[None, "stop"]))
    server.body = b"\xef\xbb\xbf" + server.body.replace(b"\n", b"\r\n")
    text, end = await answer(engine)
    assert (text, end.finish) == ("one two", FinishReason.STOP)
