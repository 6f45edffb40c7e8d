"""One run on a server: from its request to its last output."""

from __future__ import annotations

import asyncio
import re
from array import array
from collections.abc import Awaitable, Callable, Collection, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from qlm_agent.delivery.logprobs import Records
from qlm_agent.delivery.stop_strings import Found, Piece, StopStrings
from qlm_agent.engines.openai.errors import NotServable, ServerAway, ServerError, ServerNonsense, ServerRefused
from qlm_agent.engines.openai.logprobs import records_of
from qlm_agent.engines.openai.request_body import chat_body, completion_body
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.port import EngineOutput, EngineRequest, FailureKind, FinishReason, TextPrompt, TokenPrompt
from qlm_core.chat import ChatPrompt
from qlm_core.simulated_model import TOKEN_BYTES

T = TypeVar("T")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

TOO_LONG = re.compile(r"context|max_(new_|completion_)?tokens", re.IGNORECASE)
"""In refusals of prompts that are, with their output, longer than a server's context."""

REPAIRS_MAX = 4
"""Smaller limits of the output that are tried then."""

SPECIAL_TOKENS = 64
"""At most so many tokens are assumed that a server adds to a prompt."""

TRIES_MAX = 3
RETRY_MIN_S, RETRY_MAX_S = 0.2, 2.0
"""Pauses before the second and later tries, where the server does not ask for longer ones."""

BROKEN_FINISHES = frozenset({"abort", "error", "timeout", "cancelled"})
"""How servers end an answer that they did not finish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A model of QLM on its server. `context_tokens`: of prompt and output together; `continues_chats`: its chat endpoint goes on with a
    message; `ends`: token ids that were seen to end answers."""

    name: str
    remote: str
    server: OpenAiServer
    context_tokens: int
    tells_text: bool
    continues_chats: bool
    parameters: Collection[str]
    ends: set[int]


class Run:
    """`tell`: takes its outputs, and whether they are urgent; `flowing`: set while the engine is not paused; `doubt`: has the server
    examined, and says whether it serves. `made` counts its output tokens (or pieces), those of earlier attempts included; `told` is whether
    this attempt made any."""

    def __init__(
        self,
        request: EngineRequest,
        model: RemoteModel,
        tell: Callable[[EngineOutput, bool], None],
        flowing: asyncio.Event,
        doubt: Callable[[], Awaitable[bool]],
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self.model = model
        self.made = len(request.produced_pieces) if model.tells_text else len(request.produced) // TOKEN_BYTES
        self.prompt_tokens = request.prompt_tokens
        self.told = False
        self._heard = False
        self._half = ""  # of a character
        self._tell = tell
        self._flowing = flowing
        self._doubt = doubt
        self._clock = clock
        self._started_s = clock()
        self._stop = StopStrings(request.sampling.stop) if request.sampling.stop else None
        self._records = Records(request.sampling.logprobs)

    async def main(self) -> None:
        """Runs it. Whatever goes wrong with the server is its last output."""
        try:
            await self._run()
        except ServerError as error:
            if error.kind is not FailureKind.REFUSED and not await self._doubt():
                # Known when the failure is told. Output that was heard broke off: it may be what the server fell over.
                self._fail(error if self._heard else ServerAway(str(error)))
            else:
                self._fail(error)

    def broken(self, message: str, *, away: bool = False) -> None:
        """Ends it as broken, or as not served; `main` is to be cancelled then."""
        self._fail(ServerAway(message) if away else ServerError(message))

    async def _run(self) -> None:
        prompt = await self._prompt()
        produced = self.made
        if self.prompt_tokens >= self.model.context_tokens:
            raise NotServable(f"the prompt's {self.prompt_tokens} tokens leave nothing of a context of {self.model.context_tokens}")
        left = min(self.request.output_tokens_max, self.model.context_tokens - self.prompt_tokens) - produced
        if left <= 0 or self._had_ended():
            # An earlier attempt made all of it and was lost before it could say so.
            self._finish(FinishReason.LENGTH if left <= 0 else FinishReason.STOP)
            return
        path = CHATS if isinstance(prompt, ChatPrompt) else COMPLETIONS
        body = completion_body(self.model.remote, prompt, self.request.sampling, self.model.parameters)
        for max_tokens in self._limits(left, prompt):
            body["max_tokens"] = max_tokens
            try:
                await self._patiently(lambda: self._generate(path, body))
                return
            except ServerRefused as error:
                refusal = error
                if self._heard or error.kind is not FailureKind.REFUSED or not TOO_LONG.search(str(error)):
                    raise
        raise refusal

    def _limits(self, left: int, prompt: str | Sequence[int] | ChatPrompt) -> Iterator[int]:
        """`max_tokens` to try, one after the other. A text is counted in fours of bytes, so there may be less room than this; a text has at
        most as many tokens as bytes."""
        yield left
        if isinstance(prompt, str | ChatPrompt):
            text = prompt if isinstance(prompt, str) else prompt.plain_text()
            sure = self.model.context_tokens - len(text.encode()) - SPECIAL_TOKENS
            halves = [left >> shift for shift in range(1, REPAIRS_MAX + 1)]
            yield from (smaller for smaller in (sure, *halves) if 0 < smaller < left)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Tries again what may pass, but never a stream that has begun."""
        for attempt in range(1, TRIES_MAX + 1):
            heard = self._heard
            try:
                return await call()
            except ServerError as error:
                if self._heard is not heard or not error.passing or attempt == TRIES_MAX:
                    raise
                asked_s = error.retry_after_s if isinstance(error, ServerRefused) else 0.0
                await asyncio.sleep(max(asked_s, min(RETRY_MAX_S, RETRY_MIN_S * 2 ** (attempt - 1))))
        raise AssertionError("the last try returns or raises")

    async def _prompt(self) -> str | Sequence[int] | ChatPrompt:
        """Prompt and output so far, as the server takes them."""
        prompt, request = self.request.prompt, self.request
        if self.model.tells_text:
            if isinstance(prompt, TokenPrompt):
                raise NotServable(
                    f"its server takes only text: {self.model.name} must have no tokenizer in QLM, or agent.openai.output=tokens"
                )
            made = "".join(request.produced_pieces)
            return prompt.text + made if isinstance(prompt, TextPrompt) else self._continued(prompt, made)
        if isinstance(prompt, TokenPrompt):
            ids = list(prompt.ids)
        elif isinstance(prompt, ChatPrompt):
            ids = await self._tokenized(chat_body(prompt))
        else:
            ids = await self._tokenized({"prompt": prompt.text, "add_special_tokens": True})
        self.prompt_tokens = len(ids)
        return ids + list(_ids(request.produced))

    def _continued(self, chat: ChatPrompt, made: str) -> ChatPrompt:
        """A chat with what was made of its answer. Raises NotServable."""
        if "tools" in chat.variables:
            raise NotServable("its server tells only text: tools need agent.openai.output=tokens")
        if (made or chat.continue_final_message) and not self.model.continues_chats:
            what = "resume a chat whose answer has begun" if made else "continue a message"
            raise NotServable(f"its server cannot {what} (agent.openai.continues_chats)")
        if not made:
            return chat
        *before, last = chat.messages if chat.continue_final_message else (*chat.messages, {"role": "assistant", "content": ""})
        return replace(chat, messages=(*before, {**last, "content": last["content"] + made}), continue_final_message=True)

    async def _tokenized(self, body: Mapping[str, object]) -> list[int]:
        return await self._patiently(lambda: self.model.server.tokenize({"model": self.model.remote, **body}))

    def _had_ended(self) -> bool:
        """What was produced ends with the end of an answer."""
        produced = self.request.produced
        if not produced or self.request.sampling.ignore_eos:
            return False
        return int.from_bytes(produced[-TOKEN_BYTES:], "little") in self.model.ends

    # Output -----------------------------------------------------------------------------------------------------------

    async def _generate(self, path: str, body: Mapping[str, object]) -> None:
        finish: FinishReason | None = None
        async with aclosing(self.model.server.stream(path, body)) as chunks:
            async for chunk in chunks:
                self._heard = True
                await self._flowing.wait()
                if finish is not None:
                    continue  # to the end of the stream, so that the connection is kept
                made, reason = self._read(chunk)
                found: Found | None = None
                told = [made]
                if self._stop is not None:
                    told, found = self._stop.feed(made)
                if found is not None:
                    self._made([*told, await self._until(found)])
                    self._finish(FinishReason.STOP)
                    return
                finish = self._finish_reason(reason, made)
                if finish is not None and self._stop is not None:
                    told += self._stop.flush()
                self._made(told)
                if finish is not None:
                    self._finish(finish)
        if finish is None:
            raise ServerNonsense(f"{self.model.server.base_url}: a stream without a finish reason")

    def _read(self, chunk: Mapping[str, Any]) -> tuple[Piece, str | None]:
        """What a chunk says. Raises ServerNonsense."""
        url = self.model.server.base_url
        choices = chunk.get("choices")
        if choices == []:
            return Piece(""), None
        choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
        text, reason, ids = choice.get("text"), choice.get("finish_reason"), choice.get("token_ids")
        if self.model.tells_text and isinstance(self.request.prompt, ChatPrompt):
            delta = choice.get("delta")
            text = (delta.get("content") or "") if isinstance(delta, dict) else None  # others tell of roles and reasoning
        if text is None and (reason or "text" in choice):
            text = ""  # some servers leave out, or null, what is empty
        if not isinstance(text, str) or not isinstance(reason, str | None):
            raise ServerNonsense(f"{url}: a chunk without text")
        reason = reason or None  # some servers say "" of an answer that goes on
        if self.model.tells_text:
            return Piece(self._characters(text, last=reason is not None)), reason
        if ids is None and text:
            raise ServerNonsense(f"{url} tells no token ids: it needs vLLM >= 0.10.2, or agent.openai.output=text")
        try:
            made = Piece(text, tuple(array("I", ids or ())))
        except (TypeError, OverflowError) as error:
            raise ServerNonsense(f"{url}: token ids that are none: {error}") from error
        if self.request.sampling.logprobs is not None and made.token_ids:
            try:
                self._records.add(records_of(choice.get("logprobs"), made.token_ids, self.request.sampling.logprobs))
            except ValueError as error:
                raise ServerNonsense(f"{url}: {error}") from error
        return made, reason

    def _characters(self, text: str, *, last: bool) -> str:
        """Text that can be stored: a server that counts in UTF-16 may cut a character in two, whose first half waits for the second."""
        text, self._half = self._half + text, ""
        if text.isascii():
            return text
        if not last and "\ud800" <= text[-1] <= "\udbff":
            text, self._half = text[:-1], text[-1]
        return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")

    def _finish_reason(self, reason: str | None, made: Piece) -> FinishReason | None:
        if reason is None:
            return None
        if reason in BROKEN_FINISHES:
            raise ServerError(f"{self.model.server.base_url} ended the answer: {reason}")
        if reason == "length":
            return FinishReason.LENGTH
        if made.token_ids and len(self.model.ends) < 16:
            self.model.ends.add(made.token_ids[-1])
        return FinishReason.STOP

    async def _until(self, found: Found) -> Piece:
        """What comes before a stop string: of token ids as many as their text lies before it."""
        last = found.last
        if self.model.tells_text:
            return Piece(last.text[: found.at])
        count = 0
        while found.at and count < len(last.token_ids) - 1:
            ids = last.token_ids[: count + 1]
            text = await self._patiently(partial(self.model.server.detokenize, self.model.remote, ids))
            dropped = last.text.startswith(" ") and not text.startswith(" ")  # decoders leave out the space before a first word
            if len(text) + dropped > found.at:
                break
            count += 1
        return Piece("", last.token_ids[:count])

    def _made(self, made: Sequence[Piece]) -> None:
        now_s = self._clock()
        ids = array("I", [token for each in made for token in each.token_ids]).tobytes()
        pieces = tuple(each.text for each in made if each.text) if self.model.tells_text else ()
        count = len(pieces) if self.model.tells_text else len(ids) // TOKEN_BYTES
        if not count:
            return
        self.made += count
        logprobs = self._records.take(len(ids) // TOKEN_BYTES)
        self._tell(EngineOutput(self.request.run_id, ids, self._started_s, now_s, now_s, pieces, logprobs), not self.told)
        self.told = True

    def _finish(self, finish: FinishReason) -> None:
        self._end(EngineOutput(self.request.run_id, b"", self._started_s, 0.0, 0.0, finish=finish))

    def _fail(self, error: ServerError) -> None:
        self._end(EngineOutput(self.request.run_id, b"", self._started_s, 0.0, 0.0, failure=error.failure()))

    def _end(self, output: EngineOutput) -> None:
        output.first_s = output.last_s = self._clock()
        self._tell(output, True)


def _ids(produced: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(produced)
    return ids
