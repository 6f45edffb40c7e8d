"""The official client reading a streamed chat to its end through gateways and servers that die, token by token as the model has it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

import openai
from openai.types.chat import ChatCompletionChunk

from benchmarks.queue.prompts import MODEL, VOCABULARY_SIZE
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES, answer_tokens, prompt_digest, text_token_ids

CALL_TIMEOUT_S = 30.0
"""Longest silence of a stream; a gateway sends a comment line after 15 s."""
PAUSE_MIN_S, PAUSE_MAX_S = 0.05, 1.0
RESUMED_CODES = ("queue_unavailable", "draining")
"""Errors within a stream, or statuses 503 before it, after which the same call continues at any gateway."""


def gateway_clients(addresses: Sequence[str]) -> tuple[openai.AsyncOpenAI, ...]:
    """One for each gateway ("host:port"), without retries of their own: those would stay with a dead gateway."""
    return tuple(
        openai.AsyncOpenAI(base_url=f"http://{address}/v1", api_key="none", max_retries=0, timeout=CALL_TIMEOUT_S) for address in addresses
    )


def expected_text(content: str, count: int) -> str:
    """The simulated model's answer of `count` tokens to a chat of one message, as text of a gateway without a tokenizer."""
    text = ChatPrompt(messages=({"role": "user", "content": content},)).plain_text()
    answer = answer_tokens(prompt_digest(MODEL, text_token_ids(text, VOCABULARY_SIZE)), 0, count, VOCABULARY_SIZE)
    tokens = (int.from_bytes(answer[at : at + TOKEN_BYTES], "little") for at in range(0, len(answer), TOKEN_BYTES))
    return "".join(f" t{token}" for token in tokens)


class WrongText(Exception):
    """A stream has text that is not the model's, or an end before it."""


@dataclass(slots=True, kw_only=True)
class StreamedChat:
    """One streamed chat of `max_tokens` tokens. `key`: its idempotency key. `by_event`: a broken stream continues after its last event;
    else it is read again from the start. `breaks`: how often it broke off after its head; `resumes`: of
    these, after a token."""

    key: str
    content: str
    max_tokens: int
    slo_s: float
    by_event: bool
    breaks: int = 0
    resumes: int = 0
    _expected: str = ""
    _text: str = ""
    _last: ChatCompletionChunk | None = None
    _open: bool = False

    async def read(self, clients: Sequence[openai.AsyncOpenAI], first: int, timeout_s: float) -> None:
        """Reads all of it, from the client `first` and after each break from the next one. Raises WrongText, TimeoutError, and
        openai.APIError for what the same call cannot continue after."""
        self._expected = expected_text(self.content, self.max_tokens)
        pause_s = PAUSE_MIN_S
        async with asyncio.timeout(timeout_s):
            while True:
                had = len(self._text)
                try:
                    if await self._read_once(clients[first % len(clients)]):
                        return
                    raise WrongText(f"{self.key}: the stream ended without its usage")
                except openai.APIConnectionError:
                    pass
                except openai.APIError as error:
                    if error.code not in RESUMED_CODES:
                        raise
                self.breaks += self._open
                self.resumes += bool(self._open and self._text)
                first += 1
                pause_s = PAUSE_MIN_S if len(self._text) > had else min(2 * pause_s, PAUSE_MAX_S)
                await asyncio.sleep(pause_s)

    async def _read_once(self, client: openai.AsyncOpenAI) -> bool:
        """Whether the stream was read to its end."""
        headers = {"Idempotency-Key": self.key, "x-qlm-slo-seconds": f"{self.slo_s:g}"}
        if self.by_event and self._last is not None:
            headers["Last-Event-ID"] = f"{self._last.id}/{self._last.created}/{len(self._text.split())}"
        else:
            self._text = ""
        self._open = False
        stream = await client.chat.completions.create(
            model=MODEL,
            messages=[{"role": "user", "content": self.content}],
            max_tokens=self.max_tokens,
            stream=True,
            stream_options={"include_usage": True},
            extra_headers=headers,
            extra_body={"ignore_eos": True},
        )
        ended, self._open = False, True
        async for chunk in stream:
            if chunk.choices:
                self._last = chunk
                self._text += chunk.choices[0].delta.content or ""
                if not self._expected.startswith(self._text):
                    raise WrongText(f"{self.key}: the text is not the model's after {len(self._text.split())} tokens")
            elif chunk.usage is not None:
                ended = True
                if self._text != self._expected or chunk.usage.completion_tokens != self.max_tokens:
                    raise WrongText(f"{self.key}: {len(self._text.split())} tokens and a usage of {chunk.usage.completion_tokens}")
        return ended
