"""A small server of OpenAI's completions API that knows only text, as a process of its own, with the faults that servers have.

A prompt is "<anything> [30 words]": the answer has so many words, each made from what stands before the bracket and from its place, so
output is the same however often it is interrupted. Text after the bracket is output already. A word is a token. The answer to another
prompt fills the context.

The last message of a chat is the prompt, or the last but one where `continue_final_message` is set, which is output already then.

`POST /fault {"name": ..., "count": N}`: the next N completions go wrong: `busy` (503), `limited` (429, Retry-After), `refused` (400),
`broken` (500), `drop` (the connection, after a few words), `refuse_connection` (before any answer), `stall` (silence after a few words),
`silent` (no answer), `nonsense`, `no_choice`, `error_event`, `abort` (a finish reason), `no_finish`,
`echo` (400 with the prompt), `strict` (400 where prompt and `max_tokens` are more than the context). `GET /open`: how many run.

It sleeps as vLLM does in sleep mode (`--no-sleep-mode`: as vLLM without it), and answers no completions then. Faults of that: `sleepless`
(says yes and stays awake), `sleep_says_no` (500, and sleeps), `wake_fails` (500), `wakes_broken` (completions fail from then on), `no_info`
(500 to /server_info). With a `status` all completions are answered with that, until the next fault is set.
`GET /calls`: the calls that it received, in order.

It has metrics once they were set (`POST /metrics`, as they are to be read).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import zlib
from typing import Any

from aiohttp import web

CONTEXT_WORDS = 2048
POISON, POISON_S = "poison", 0.05
"""A prompt with this word ends the server, after so long."""
MODEL, OTHER_MODEL = "text-model", "other-model"
PROMPT = re.compile(r"^(?P<head>.*?)\[(?P<answer>\d+) words\](?P<made>.*)$", re.DOTALL)
UNSAID = f"[{CONTEXT_WORDS} words]"
"""How long the answer to another prompt is."""
WORDS_BEFORE_FAULT = 5
WORD_S = 0.001
LIMITED_S = 0.1
"""Retry-After of `limited`."""
KEY = "server-key"


def text_prompt(number: int, words: int, answer: int) -> str:
    """A prompt of so many words, with an answer of known length."""
    return " ".join([f"w{number}"] * (words - 1)) + f" [{answer} words]"


def answer_word(model: str, head: str, place: int) -> str:
    """The word at a place of an answer."""
    return f" {zlib.crc32(f'{model}/{head}/{place}'.encode()):x}"


class TextServer:
    """See the module."""

    def __init__(self, sleep_mode: bool, models: list[str]) -> None:
        self._listed = models
        self._faults: list[str] = []
        self._open = 0
        self._sleep_mode = sleep_mode
        self._asleep: set[str] = set()  # weights, kv_cache
        self._broken = False
        self._sick = 0
        self._calls: list[str] = []
        self._said = ""  # its metrics

    def app(self) -> web.Application:
        app = web.Application(middlewares=[_authorised])
        app.add_routes(
            [
                web.get("/v1/models", self._models),
                web.post("/v1/completions", self._completions),
                web.post("/v1/chat/completions", self._completions),
                web.post("/fault", self._fault),
                web.get("/open", self._opened),
                web.get("/calls", self._called),
                web.get("/metrics", self._metrics),
                web.post("/metrics", self._set_metrics),
                web.get("/server_info", self._info),
                web.get("/is_sleeping", self._is_sleeping),
                web.post("/sleep", self._sleep),
                web.post("/wake_up", self._wake_up),
                web.post("/collective_rpc", self._recorded),
                web.post("/reset_prefix_cache", self._recorded),
            ]
        )
        return app

    async def _models(self, _request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": name, "object": "model"} for name in self._listed]})

    async def _fault(self, request: web.Request) -> web.Response:
        body = await request.json()
        self._faults = [body["name"]] * body.get("count", 1)
        self._sick = body.get("status", 0)
        return web.json_response({})

    async def _opened(self, _request: web.Request) -> web.Response:
        return web.json_response({"open": self._open})

    async def _called(self, _request: web.Request) -> web.Response:
        return web.json_response({"calls": self._calls})

    async def _metrics(self, _request: web.Request) -> web.Response:
        return web.Response(text=self._said) if self._said else _error(404, "no metrics")

    async def _set_metrics(self, request: web.Request) -> web.Response:
        self._said = await request.text()
        return web.json_response({})

    async def _info(self, _request: web.Request) -> web.Response:
        if "no_info" in self._faults:
            return _error(500, "out of order")
        return web.json_response({"vllm_config": {"model_config": {"enable_sleep_mode": self._sleep_mode}}})

    async def _is_sleeping(self, _request: web.Request) -> web.Response:
        return web.json_response({"is_sleeping": bool(self._asleep)})

    async def _recorded(self, request: web.Request) -> web.Response:
        self._calls.append(request.path_qs)
        return web.json_response({})

    async def _sleep(self, request: web.Request) -> web.Response:
        self._calls.append(request.path_qs)
        if "sleepless" not in self._faults:
            self._asleep = {"weights", "kv_cache"}
        return _error(500, "it says no") if "sleep_says_no" in self._faults else web.json_response({"status": "sleeping"})

    async def _wake_up(self, request: web.Request) -> web.Response:
        self._calls.append(request.path_qs)
        if "wake_fails" in self._faults:
            return _error(500, "out of memory")
        self._broken = "wakes_broken" in self._faults
        self._asleep -= set(request.query.getall("tags", ["weights", "kv_cache"]))
        return web.json_response({"status": "awake"})

    async def _completions(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        if self._asleep or self._broken:
            return _error(500, "no weights")
        if self._sick:
            return _error(self._sick, "sick")
        if not body.get("stream"):
            return web.json_response({"choices": [{"text": " word", "finish_reason": "length"}]})
        if POISON in str(body.get("prompt")):
            await asyncio.sleep(POISON_S)
            os._exit(1)
        fault = self._faults.pop(0) if self._faults else ""
        self._open += 1
        try:
            return await self._answer(request, body, fault)
        finally:
            self._open -= 1

    async def _answer(self, request: web.Request, body: dict[str, Any], fault: str) -> web.StreamResponse:
        match fault:
            case "busy":
                return _error(503, "overloaded")
            case "limited":
                return web.json_response({"error": {"message": "slow down"}}, status=429, headers={"Retry-After": str(LIMITED_S)})
            case "echo":
                return _error(400, f"cannot take {body}")
            case "refused":
                return _error(400, "no such thing")
            case "broken":
                return _error(500, "out of order")
            case "refuse_connection":
                assert request.transport is not None
                request.transport.abort()
                await asyncio.sleep(3600)
            case "silent":
                await asyncio.sleep(3600)
        if "messages" in body:
            said = [message["content"] for message in body["messages"]]
            body["prompt"] = said[-2] + said[-1] if body.get("continue_final_message") else said[-1]
            self._calls.append(json.dumps(body["messages"]))
        found = PROMPT.match(body["prompt"]) or PROMPT.match(body["prompt"] + UNSAID)
        if found is None or "return_token_ids" in body:
            return _error(400, "only text prompts")
        made = len(found["made"].split())
        words = len(found["head"].split()) + 1
        if words + made >= CONTEXT_WORDS or (fault == "strict" and words + made + body.get("max_tokens", 0) > CONTEXT_WORDS):
            return _error(400, f"This model's maximum context length is {CONTEXT_WORDS} tokens")
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        await self._stream(request, response, body, (found["head"], int(found["answer"]), made, words), fault)
        return response

    async def _stream(
        self, request: web.Request, response: web.StreamResponse, body: dict[str, Any], shape: tuple[str, int, int, int], fault: str
    ) -> None:
        head, answer, made, words = shape
        end = min(made + body["max_tokens"], CONTEXT_WORDS - words)
        stops = not body.get("ignore_eos") and answer <= end
        end = answer if stops else end
        reason = "stop" if stops else "length"
        for place in range(made, end):
            await asyncio.sleep(WORD_S)
            if fault and place - made == WORDS_BEFORE_FAULT:
                if fault in ("nonsense", "no_choice", "error_event"):
                    data = {
                        "nonsense": b"{not json",
                        "no_choice": b'{"choices": [7]}',
                        "error_event": b'{"error": {"message": "it broke"}}',
                    }
                    await response.write(b"data: " + data[fault] + b"\n\n")
                    return
                if fault == "drop":
                    assert request.transport is not None
                    request.transport.abort()
                    return
                if fault == "stall":
                    await asyncio.sleep(3600)
                if fault in ("abort", "no_finish"):
                    end, reason = place, "abort"
                    break
            await _write(response, body, answer_word(body["model"], head, place), reason if place == end - 1 else None)
        if fault == "abort" or end <= made:
            await _write(response, body, "", reason)
        await response.write(b"data: [DONE]\n\n")


async def _write(response: web.StreamResponse, body: dict[str, Any], text: str, reason: str | None) -> None:
    said = {"delta": {"content": text}} if "messages" in body else {"text": text}
    chunk = {"choices": [{"index": 0, "finish_reason": reason, **said}]}
    await response.write(f"data: {json.dumps(chunk)}\n\n".encode())


def _error(status: int, message: str) -> web.Response:
    return web.json_response({"error": {"message": message, "type": "error", "code": status}}, status=status)


@web.middleware
async def _authorised(request: web.Request, handler: Any) -> web.StreamResponse:
    if request.headers.get("Authorization") != f"Bearer {KEY}":
        return _error(401, "wrong key")
    response: web.StreamResponse = await handler(request)
    return response


async def main(port: int, sleep_mode: bool, models: list[str]) -> None:
    """Serves until it is killed; prints its port."""
    runner = web.AppRunner(TextServer(sleep_mode, models).app(), handler_cancellation=True)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", port).start()
    print(runner.addresses[0][1], flush=True)  # noqa: T201
    await asyncio.Event().wait()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--model", dest="models", action="append")
    parser.add_argument("--no-sleep-mode", dest="sleep_mode", action="store_false")
    arguments = parser.parse_args()
    asyncio.run(main(arguments.port, arguments.sleep_mode, arguments.models or [MODEL, OTHER_MODEL]))
