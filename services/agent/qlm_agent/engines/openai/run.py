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
from qlm_agent.delivery.stop_strings import Piece, StopMatch, StopStrings
from qlm_agent.engines.openai.errors import NotServable, ServerAway, ServerError, ServerProtocolError, ServerRefused
from qlm_agent.engines.openai.logprobs import records_of
from qlm_agent.engines.openai.request_body import chat_body, completion_body
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.port import EngineOutput, EngineRequest, FailureKind, FinishReason, TextPrompt, TokenPrompt
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.simulated_model import TOKEN_BYTES

T = TypeVar("T")

COMPLETIONS, CHATS = "/v1/completions", "/v1/chat/completions"

TOO_LONG = re.compile(r"context|max_(new_|completion_)?tokens", re.IGNORECASE)
"""Words of a refusal for a prompt that is, with its output, longer than the server's context."""

REPAIRS_MAX = 4
"""Smaller limits of the output for the retries."""

SPECIAL_TOKENS = 64
"""Most tokens that a server is assumed to add to a prompt."""

USAGE_WAIT_S = 1.0
"""Longest wait for what follows the last output on a stream: the usage, and its end."""

TRIES_MAX = 3
RETRY_MIN_S, RETRY_MAX_S = 0.2, 2.0
"""Pauses before the second and later tries; a server may demand longer ones."""

BROKEN_FINISHES = frozenset({"abort", "error", "timeout", "cancelled"})
"""Reasons with which servers end an unfinished answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RemoteModel:
    """A model of QLM on its server. `context_tokens`: of prompt and output together; `continues_chats`: its chat endpoint continues a
    message; `ends`: token ids that have ended answers."""

    name: str
    remote: str
    server: OpenAiServer
    context_tokens: int
    text_output: bool
    continues_chats: bool
    parameters: Collection[str]
    ends: set[int]


class Run:
    """`emit`: takes its outputs, and whether they are urgent; `flowing`: set while the engine is not paused; `examine`: has the server
    examined, and returns whether it serves. `made` counts its output tokens (or pieces), earlier attempts included; `produced_any`: this
    attempt has output."""

    def __init__(
        self,
        request: EngineRequest,
        model: RemoteModel,
        emit: Callable[[EngineOutput, bool], None],
        flowing: asyncio.Event,
        examine: Callable[[], Awaitable[bool]],
        clock: Callable[[], float],
    ) -> None:
        self.request = request
        self.model = model
        self.made = len(request.produced_pieces) if model.text_output else len(request.produced) // TOKEN_BYTES
        self.prompt_tokens = request.prompt_tokens
        self.produced_any = False
        self._cached_tokens: int | None = None
        self._heard = False
        self._half = ""  # of a character
        self._emit = emit
        self._flowing = flowing
        self._examine = examine
        self._clock = clock
        self._started_s = clock()
        self._stop = StopStrings(request.sampling.stop) if request.sampling.stop else None
        self._records = Records(request.sampling.logprobs)

    async def main(self) -> None:
        """Runs to the end. Any server error is its last output."""
        try:
            await self._run()
        except ServerError as error:
            if error.kind is not FailureKind.REFUSED and not await self._examine():
                # Known when the failure is reported. Output that broke off may have broken the server.
                self._fail(error if self._heard else ServerAway(str(error)))
            else:
                self._fail(error)

    def broken(self, message: str, *, away: bool = False) -> None:
        """Ends it as broken, or as not served; the caller then cancels `main`."""
        self._fail(ServerAway(message) if away else ServerError(message))

    async def _run(self) -> None:
        prompt = await self._prompt()
        produced = self.made
        if self.prompt_tokens >= self.model.context_tokens:
            raise NotServable(f"the prompt's {self.prompt_tokens} tokens leave nothing of a context of {self.model.context_tokens}")
        left = min(self.request.output_tokens_max, self.model.context_tokens - self.prompt_tokens) - produced
        if left <= 0 or self._had_ended():
            # An earlier attempt produced all of it and ended before the report.
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
        """`max_tokens` to try, in order. A text is estimated at four bytes a token, so there may be less room; a text has at most as many
        tokens as bytes."""
        yield left
        if isinstance(prompt, str | ChatPrompt):
            text = prompt if isinstance(prompt, str) else prompt.plain_text()
            sure = self.model.context_tokens - len(text.encode()) - SPECIAL_TOKENS
            halves = [left >> shift for shift in range(1, REPAIRS_MAX + 1)]
            yield from (smaller for smaller in (sure, *halves) if 0 < smaller < left)

    async def _patiently(self, call: Callable[[], Awaitable[T]]) -> T:
        """Retries transient errors, but never a stream that has begun."""
        for attempt in range(1, TRIES_MAX + 1):
            heard = self._heard
            try:
                return await call()
            except ServerError as error:
                if self._heard is not heard or not error.passing or attempt == TRIES_MAX:
                    raise
                server_s = error.retry_after_s if isinstance(error, ServerRefused) else 0.0
                await asyncio.sleep(max(server_s, min(RETRY_MAX_S, RETRY_MIN_S * 2 ** (attempt - 1))))
        raise AssertionError("the last try returns or raises")

    async def _prompt(self) -> str | Sequence[int] | ChatPrompt:
        """Prompt and output so far, in the server's form."""
        prompt, request = self.request.prompt, self.request
        if self.model.text_output:
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
        """A chat with the output so far as its answer. Raises NotServable."""
        if "tools" in chat.variables:
            raise NotServable("its server returns only text: tools need agent.openai.output=tokens")
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
        """The output so far ends with an end of answer."""
        produced = self.request.produced
        if not produced or self.request.sampling.ignore_eos:
            return False
        return int.from_bytes(produced[-TOKEN_BYTES:], "little") in self.model.ends

    # Output -----------------------------------------------------------------------------------------------------------

    async def _generate(self, path: str, body: Mapping[str, object]) -> None:
        finish: FinishReason | None = None
        released: list[Piece] = []
        try:
            async with aclosing(self.model.server.stream(path, body)) as chunks, asyncio.timeout(None) as patience:
                async for chunk in chunks:
                    self._heard = True
                    await self._flowing.wait()
                    self._read_usage(chunk)
                    if finish is not None:
                        continue  # to the end of the stream, so that the connection is kept
                    made, reason = self._read(chunk)
                    found: StopMatch | None = None
                    released = [made]
                    if self._stop is not None:
                        released, found = self._stop.feed(made)
                    if found is not None:
                        self._push([*released, await self._until(found)])
                        self._finish(FinishReason.STOP)
                        return
                    finish = self._finish_reason(reason, made)
                    if finish is not None and self._stop is not None:
                        released += self._stop.flush()
                    if finish is None:
                        self._push(released)
                    else:  # the last output and the end go together: a run that is aborted in between would go on after its end
                        patience.reschedule(asyncio.get_running_loop().time() + USAGE_WAIT_S)
        except (TimeoutError, ServerError):
            if finish is None:
                raise
        if finish is None:
            raise ServerProtocolError(f"{self.model.server.base_url}: a stream without a finish reason")
        self._push(released)
        self._finish(finish)

    def _read(self, chunk: Mapping[str, Any]) -> tuple[Piece, str | None]:
        """The output of a chunk. Raises ServerProtocolError."""
        url = self.model.server.base_url
        choices = chunk.get("choices")
        if choices == []:
            return Piece(""), None
        choice = choices[0] if isinstance(choices, list) and isinstance(choices[0], dict) else {}
        text, reason, ids = choice.get("text"), choice.get("finish_reason"), choice.get("token_ids")
        if self.model.text_output and isinstance(self.request.prompt, ChatPrompt):
            delta = choice.get("delta")
            text = (delta.get("content") or "") if isinstance(delta, dict) else None  # other chunks carry roles and reasoning
        if text is None and (reason or "text" in choice):
            text = ""  # some servers omit or null an empty text
        if not isinstance(text, str) or not isinstance(reason, str | None):
            raise ServerProtocolError(f"{url}: a chunk without text")
        reason = reason or None  # some servers send "" while an answer continues
        if self.model.text_output:
            return Piece(self._characters(text, last=reason is not None)), reason
        if ids is None and text:
            raise ServerProtocolError(f"{url} returns no token ids: it needs vLLM >= 0.10.2, or agent.openai.output=text")
        try:
            made = Piece(text, tuple(array("I", ids or ())))
        except (TypeError, OverflowError) as error:
            raise ServerProtocolError(f"{url}: token ids that are none: {error}") from error
        if self.request.sampling.logprobs is not None and made.token_ids:
            try:
                self._records.add(records_of(choice.get("logprobs"), made.token_ids, self.request.sampling.logprobs))
            except ValueError as error:
                raise ServerProtocolError(f"{url}: {error}") from error
        return made, reason

    def _read_usage(self, chunk: Mapping[str, Any]) -> None:
        """Takes what the server's prefix cache had of the prompt, in tokens as the gateway counted it, where the chunk says so."""
        usage = chunk.get("usage")
        details = usage.get("prompt_tokens_details") if isinstance(usage, dict) else None
        if isinstance(usage, dict) and isinstance(details, dict):
            cached, prompt = details.get("cached_tokens"), usage.get("prompt_tokens")
            if isinstance(cached, int) and isinstance(prompt, int) and 0 <= cached <= prompt and prompt:
                self._cached_tokens = round(cached / prompt * self.request.prompt_tokens)

    def _characters(self, text: str, *, last: bool) -> str:
        """Text that can be stored: a server that counts in UTF-16 may cut a character in two; the first half waits for the second."""
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

    async def _until(self, found: StopMatch) -> Piece:
        """The output before a stop string: of token ids, those whose text lies before it."""
        last = found.last
        if self.model.text_output:
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

    def _push(self, made: Sequence[Piece]) -> None:
        now_s = self._clock()
        ids = array("I", [token for each in made for token in each.token_ids]).tobytes()
        pieces = tuple(each.text for each in made if each.text) if self.model.text_output else ()
        count = len(pieces) if self.model.text_output else len(ids) // TOKEN_BYTES
        if not count:
            return
        self.made += count
        logprobs = self._records.take(len(ids) // TOKEN_BYTES)
        self._emit(EngineOutput(self.request.run_id, ids, self._started_s, now_s, now_s, pieces, logprobs), not self.produced_any)
        self.produced_any = True

    def _finish(self, finish: FinishReason) -> None:
        self._end(EngineOutput(self.request.run_id, b"", self._started_s, 0.0, 0.0, finish=finish))

    def _fail(self, error: ServerError) -> None:
        self._end(EngineOutput(self.request.run_id, b"", self._started_s, 0.0, 0.0, failure=error.failure()))

    def _end(self, output: EngineOutput) -> None:
        output.first_s = output.last_s = self._clock()
        output.cached_tokens = self._cached_tokens
        self._emit(output, True)


def _ids(produced: bytes) -> array[int]:
    ids = array("I")
    ids.frombytes(produced)
    return ids
