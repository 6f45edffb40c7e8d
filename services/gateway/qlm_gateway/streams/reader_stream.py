"""Output for one reader, between the hub that delivers and the call that takes. Bounded by the machine, not here."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Iterable, Sequence

from qlm.api.v1.request_pb2 import Logprobs, Result
from qlm_core.vocabulary.errors import QlmError
from qlm_gateway.streams.events import ReaderId
from qlm_gateway.text.logprobs import logprobs_part

TOKENS_TAKEN_MAX = 1_024
"""Most tokens in one message to a client: grpc holds no more than this for a client that does not read."""


class ReaderStream:
    """Consecutive output from `offset` on, as token ids (with log probabilities where requested) or text pieces, and the end.
    `model`, `before`: known once the request is: the model's name, and the tokens just before the first. `forgotten`: what was here was
    taken back; the reader is to say where it stands."""

    __slots__ = (
        "_logprobs", "_pieces", "_tokens", "_waiter", "before", "error", "failure", "forgotten", "model", "offset", "reader", "result",
    )  # fmt: skip

    def __init__(self, reader: ReaderId) -> None:
        self.reader = reader
        self.offset = 0
        self.result: Result | None = None
        self.error: QlmError | None = None
        self.failure: QlmError | None = None
        self.forgotten = False
        self.model = ""
        self.before: Sequence[int] = ()
        # Four bytes a token: a list of thousands of ints is ten times that.
        self._tokens = array("I")
        self._pieces: list[str] = []
        self._logprobs: Logprobs | None = None
        self._waiter: asyncio.Future[None] | None = None

    @property
    def unread(self) -> int:
        """Tokens, or pieces, that can be taken."""
        return len(self._tokens) or len(self._pieces)

    @property
    def ready(self) -> bool:
        """There is something to wait for no longer."""
        return bool(self.unread) or self.result is not None or self.error is not None or self.forgotten

    def give(self, offset: int, tokens: Iterable[int], pieces: Iterable[str], logprobs: Logprobs | None = None) -> None:
        """Output that follows what is here."""
        if not self.unread:
            self.offset = offset
        self._tokens.extend(tokens)
        self._pieces.extend(pieces)
        if logprobs is not None:
            if self._logprobs is None:
                self._logprobs = Logprobs()
            self._logprobs.MergeFrom(logprobs)

    def forget(self) -> None:
        """Takes back what was given and the end with it."""
        self._tokens, self._pieces, self._logprobs = array("I"), [], None
        self.result = None
        self.forgotten = True

    def take(self) -> tuple[int, Sequence[int], Sequence[str], Logprobs | None]:
        """The first output that is here, at most `TOKENS_TAKEN_MAX`: its offset, token ids, pieces and log probabilities."""
        offset, tokens, pieces, logprobs = self.offset, self._tokens, self._pieces, self._logprobs
        if self.unread <= TOKENS_TAKEN_MAX:
            self._tokens, self._pieces, self._logprobs = array("I"), [], None
        else:
            self._tokens, self._pieces = tokens[TOKENS_TAKEN_MAX:], pieces[TOKENS_TAKEN_MAX:]
            if logprobs is not None:
                self._logprobs = logprobs_part(logprobs, TOKENS_TAKEN_MAX, len(tokens))
                logprobs = logprobs_part(logprobs, 0, TOKENS_TAKEN_MAX)
            tokens, pieces = tokens[:TOKENS_TAKEN_MAX], pieces[:TOKENS_TAKEN_MAX]
        self.offset += len(tokens) or len(pieces)
        return offset, tokens, pieces, logprobs

    def notify(self) -> None:
        """Something was delivered."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Until there is output, the end, an error, or nothing any more. One waiter at a time."""
        while not self.ready:
            self._waiter = asyncio.get_running_loop().create_future()
            await self._waiter
