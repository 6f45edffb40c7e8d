"""A request as a client sent it, read from the message and not yet checked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.vocabulary.chat import ChatPrompt


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDraft:
    """`SamplingParams` of request.proto; None where a field is absent."""

    max_tokens: int = 0
    temperature: float | None = None
    top_p: float | None = None
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float | None = None
    logprobs: int | None = None
    json_schema: str | None = None
    regex: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class SloDraft:
    """`Slo` of request.proto; `kind` is the number of its SloKind, known or not."""

    kind: int
    seconds: float = 0.0
    priority: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDraft:
    """`Request` of request.proto. One of `text`, `chat` and `token_ids` is set, or none."""

    model: str
    text: str | None = None
    chat: ChatPrompt | None = None
    token_ids: Sequence[int] | None = None
    sampling: SamplingDraft | None = None
    slo: SloDraft | None = None
    tenant: str = ""
    application: str = ""
    request_id: str = ""
    expire_after_s: float | None = None
    expected_output_tokens: int = 0
    control_tokens_in_text: bool = False

    def plain_text(self) -> str:
        """All text of the prompt, a chat as models without a template read it."""
        return self.chat.plain_text() if self.chat is not None else self.text or ""
