"""The answer of a call that is not streamed, collected from its stream."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from qlm.api.v1.gateway_pb2 import StreamResponse
from qlm.api.v1.request_pb2 import Logprobs, RequestState, Result
from qlm_gateway.front.http.answers import TextOf, choice, finish_reason, logprobs_of
from qlm_gateway.front.http.calls import Call
from qlm_gateway.front.http.errors import ended_error
from qlm_gateway.front.http.joint_acceptance import JointAcceptance
from qlm_gateway.front.http.tools import ToolReader, message_of

Metadata = Sequence[tuple[str, str | bytes]]


class CollectedChoice:
    """The context of one choice's call to the service. `result`: None until it was written."""

    def __init__(self, index: int, metadata: Metadata, acceptance: JointAcceptance) -> None:
        self._index = index
        self._metadata = metadata
        self._acceptance = acceptance
        self._texts: list[str] = []
        self._token_ids: list[int] = []
        self._logprobs: Logprobs | None = None
        self.result: Result | None = None

    def invocation_metadata(self) -> Metadata:
        return self._metadata

    async def write(self, message: StreamResponse) -> None:
        """Raises RequestEnded for a result that is no answer."""
        if message.HasField("accepted"):
            await self._acceptance.accept(message.accepted)
        if message.HasField("tokens"):
            self._texts.append(message.tokens.text)
            if message.tokens.HasField("logprobs"):
                self._token_ids.extend(message.tokens.token_ids)
                self._logprobs = self._logprobs or Logprobs()
                self._logprobs.MergeFrom(message.tokens.logprobs)
        if message.HasField("result"):
            self.result = message.result
            if self.result.state != RequestState.REQUEST_STATE_COMPLETED:
                raise ended_error(self.result)

    def document(self, text_of: TextOf, call: Call) -> dict[str, Any]:
        """The choice, once it has its result."""
        assert self.result is not None, "its call has ended"
        text, reason, chat = "".join(self._texts), finish_reason(self.result), call.chat
        if call.tools is not None:
            reader = ToolReader(call.tools, call.ids[self._index])
            message = message_of(reader, text)
            return choice(self._index, text, reader.finish(reason), None, chat=chat, message=message)
        logprobs = None if self._logprobs is None else logprobs_of(self._logprobs, self._token_ids, text_of, chat=chat)
        return choice(self._index, text, reason, logprobs, chat=chat)
