"""One server over HTTP: calls with deadlines, and streams of events. Knows the protocol, no runs and no models of QLM."""

from __future__ import annotations

import asyncio
import errno
import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp

from qlm_agent.engines.openai.errors import (
    ServerAbsent,
    ServerError,
    ServerFull,
    ServerProtocolError,
    ServerRefused,
    ServerSilent,
    ServerUnreachable,
)
from qlm_agent.engines.openai.event_stream import EventStream
from qlm_agent.engines.openai.settings import OpenAiSettings

ANSWER_BYTES_MAX = 64 << 20
ERROR_CHARACTERS_MAX = 500
RETRY_AFTER_MAX_S = 60.0
CALL_CONNECTIONS_MAX = 32
"""Most concurrent calls to a server, apart from streams; others wait."""


class OpenAiServer:
    """`base_url` without /v1. `open` before any call; `close` ends all of them. Calls raise ServerError."""

    def __init__(self, base_url: str, api_key: str, settings: OpenAiSettings) -> None:
        self.base_url = base_url.rstrip("/")
        self._headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._settings = settings
        self._streams: aiohttp.ClientSession | None = None
        self._calls: aiohttp.ClientSession | None = None  # apart from streams, which need them to end

    async def open(self) -> None:
        if self._streams is None:
            self._streams, self._calls = self._session(self._settings.connections_max), self._session(CALL_CONNECTIONS_MAX)

    async def close(self) -> None:
        sessions, self._streams, self._calls = (self._streams, self._calls), None, None
        for session in sessions:
            if session is not None:
                await session.close()

    async def models(self) -> Mapping[str, Mapping[str, Any]]:
        """Its models, by its own names."""
        document = await self._json("GET", "/v1/models")
        try:
            found = {entry["id"]: entry for entry in document["data"]}
        except (KeyError, TypeError) as error:
            raise self._protocol_error("/v1/models", "no list of models") from error
        if not all(isinstance(name, str) for name in found):
            raise self._protocol_error("/v1/models", "no list of models, but another list")
        return found

    async def is_vllm(self) -> bool:
        """Whether it answers vLLM's /version."""
        try:
            return isinstance((await self._json("GET", "/version")).get("version"), str)
        except ServerRefused:
            return False

    async def metrics(self) -> str:
        """Its Prometheus metrics."""
        return (await self._call("GET", "/metrics")).decode(errors="replace")

    async def tokenize(self, body: Mapping[str, object]) -> list[int]:
        """Token ids of a prompt or of messages (vLLM's /tokenize)."""
        found = (await self._json("POST", "/tokenize", body)).get("tokens")
        if not isinstance(found, list) or not all(isinstance(token, int) for token in found):
            raise self._protocol_error("/tokenize", "no token ids")
        return found

    async def detokenize(self, model: str, token_ids: tuple[int, ...]) -> str:
        """The text of token ids (vLLM's /detokenize)."""
        found = (await self._json("POST", "/detokenize", {"model": model, "tokens": list(token_ids)})).get("prompt")
        if not isinstance(found, str):
            raise self._protocol_error("/detokenize", "no text")
        return found

    async def is_sleeping(self) -> bool:
        found = (await self._json("GET", "/is_sleeping")).get("is_sleeping")
        if not isinstance(found, bool):
            raise self._protocol_error("/is_sleeping", "neither yes nor no")
        return found

    async def can_sleep(self) -> bool:
        """Whether sleeping frees memory there. Without --enable-sleep-mode vLLM answers /sleep and /is_sleeping the same, and frees
        nothing; only its /server_info shows it, which exists wherever /sleep does."""
        said = json.dumps(await self._json("GET", "/server_info?config_format=json"))
        return '"enable_sleep_mode": false' not in said

    async def post(self, path: str, body: Mapping[str, object] | None = None) -> None:
        """A call that may take as long as a model needs to move."""
        await self._call("POST", path, body, timeout_s=self._settings.swap_timeout_s)

    async def generate(self, body: Mapping[str, object]) -> Mapping[str, Any]:
        """The choice of a completion that is not streamed."""
        found = (await self._json("POST", "/v1/completions", body, timeout_s=self._settings.swap_timeout_s)).get("choices")
        if not isinstance(found, list) or not found or not isinstance(found[0], dict):
            raise self._protocol_error("/v1/completions", "no choice")
        return found[0]

    async def stream(self, path: str, body: Mapping[str, object]) -> AsyncGenerator[Mapping[str, Any], None]:
        """The chunks of a streamed answer, to the end of the stream. Closing the iterator closes the connection, which ends generation."""
        events = EventStream()
        response: aiohttp.ClientResponse | None = None
        done = False
        try:
            async with asyncio.timeout(self._settings.first_token_timeout_s):
                response = await self._opened(self._streams).post(self.base_url + path, json=body, allow_redirects=False)
                if response.status != 200:
                    raise await self._refusal(path, response)
                found = await _events(response, events)
            while found:
                for event in found:
                    done = done or event == b"[DONE]"
                    if not done:
                        yield self._chunk(path, event)
                async with asyncio.timeout(self._settings.stall_timeout_s):
                    found = await _events(response, events)
        except TimeoutError as error:
            raise self._silent(path, error, "silent for too long") from error
        except (aiohttp.ClientError, OSError) as error:
            raise self._unreachable(path, error) from error
        except ValueError as error:
            raise self._protocol_error(path, str(error)) from error
        finally:
            if response is not None:
                response.close()  # keeps the connection where the stream was read to its end
        if not done:
            why = f": {events.beside[:ERROR_CHARACTERS_MAX]}" if events.beside else ""
            raise ServerUnreachable(f"{self.base_url}{path}: the stream broke off{why}")

    def _session(self, connections_max: int) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=connections_max),
            headers=self._headers,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=self._settings.connect_timeout_s),
        )

    def _opened(self, session: aiohttp.ClientSession | None) -> aiohttp.ClientSession:
        if session is None:
            raise ServerUnreachable(f"{self.base_url}: the engine is stopped")
        return session

    async def _json(
        self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float | None = None
    ) -> Mapping[str, Any]:
        answer = await self._call(method, path, body, timeout_s=timeout_s)
        try:
            document = json.loads(answer)
        except ValueError as error:
            raise self._protocol_error(path, "not JSON") from error
        if not isinstance(document, dict):
            raise self._protocol_error(path, "not an object")
        return document

    async def _call(self, method: str, path: str, body: Mapping[str, object] | None = None, *, timeout_s: float | None = None) -> bytes:
        try:
            async with (
                asyncio.timeout(timeout_s or self._settings.call_timeout_s),
                self._opened(self._calls).request(method, self.base_url + path, json=body, allow_redirects=False) as response,
            ):
                if response.status != 200:
                    raise await self._refusal(path, response)
                return await _bounded(response)
        except TimeoutError as error:
            raise self._silent(path, error, "no answer in time") from error
        except (aiohttp.ClientError, OSError, ValueError) as error:  # the last: an invalid host name
            raise self._unreachable(path, error) from error

    async def _refusal(self, path: str, response: aiohttp.ClientResponse) -> ServerRefused:
        text = (await _bounded(response)).decode(errors="replace")
        try:
            said = _error_message(json.loads(text)) or text
        except ValueError:
            said = text
        message = f"{self.base_url}{path} answers {response.status}: {said[:ERROR_CHARACTERS_MAX]}"
        return ServerRefused(message, response.status, _seconds(response.headers.get("Retry-After", "")))

    def _chunk(self, path: str, event: bytes) -> Mapping[str, Any]:
        chunk = json.loads(event)
        if not isinstance(chunk, dict):
            raise ServerProtocolError(f"{self.base_url}{path}: a chunk that is no object")
        error = chunk.get("error")
        if error is not None:
            code = error.get("code") if isinstance(error, dict) else None
            said = _error_message(chunk) or str(error)
            raise ServerRefused(f"{self.base_url}{path}: {said[:ERROR_CHARACTERS_MAX]}", code if isinstance(code, int) else 500)
        return chunk

    def _silent(self, path: str, error: Exception, what: str) -> ServerError:
        if isinstance(error, aiohttp.ServerTimeoutError):
            return ServerFull(f"{self.base_url}{path}: no connection within {self._settings.connect_timeout_s:g} s")
        return ServerSilent(f"{self.base_url}{path}: {what}")

    def _unreachable(self, path: str, error: Exception) -> ServerError:
        kind = ServerAbsent if isinstance(error, OSError) and error.errno == errno.ECONNREFUSED else ServerUnreachable
        return kind(f"{self.base_url}{path}: {error or type(error).__name__}")

    def _protocol_error(self, path: str, what: str) -> ServerError:
        return ServerProtocolError(f"{self.base_url}{path}: invalid answer: {what}")


async def _events(response: aiohttp.ClientResponse, events: EventStream) -> list[bytes]:
    """The next events, none at the end. Comments do not count: servers keep connections open by them, even those of hung runs."""
    while data := await response.content.readany():
        if found := events.feed(data):
            return found
    return events.end()


async def _bounded(response: aiohttp.ClientResponse) -> bytes:
    """The whole answer. Raises ServerProtocolError for one that is too big."""
    answer = bytearray()
    async for data in response.content.iter_any():
        answer += data
        if len(answer) > ANSWER_BYTES_MAX:
            raise ServerProtocolError(f"{response.url}: an answer of more than {ANSWER_BYTES_MAX} bytes")
    return bytes(answer)


def _error_message(document: object) -> str:
    """The message of OpenAI's error body; "" for any other body."""
    error = document.get("error", document) if isinstance(document, dict) else None
    message = error.get("message") if isinstance(error, dict) else None
    return message if isinstance(message, str) else ""


def _seconds(retry_after: str) -> float:
    try:
        return min(RETRY_AFTER_MAX_S, max(0.0, float(retry_after)))
    except ValueError:
        return 0.0
