"""From a checked prompt to its tokens: text and chats of models with a tokenizer become token ids, those of others are counted."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from qlm_core.vocabulary.simulated_model import text_token_count
from qlm_gateway.admission.drafts import RequestDraft
from qlm_gateway.text.model_text import ModelText

INLINE_BYTES_MAX = 16_384
"""Longer texts are tokenized in a thread: tens of milliseconds of the event loop are everybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """`tokens`: how many. One of `token_ids`, which the agent gets, and `text` is set; a text stands for a prompt that stays as it is."""

    tokens: int
    token_ids: Sequence[int] | None = None
    text: str | None = None


async def prepare(draft: RequestDraft, model: ModelText) -> PreparedPrompt:
    """Counts and, where the model has a tokenizer, tokenizes. Raises InvalidRequest where a chat template refuses the messages."""
    if draft.token_ids is not None:
        return PreparedPrompt(tokens=len(draft.token_ids), token_ids=draft.token_ids)
    text = draft.plain_text()
    if model.exact and (len(text) > INLINE_BYTES_MAX or model.holds_control_text(text)):
        return await asyncio.to_thread(_prepare_text, draft, text, model)
    return _prepare_text(draft, text, model)


def _prepare_text(draft: RequestDraft, text: str, model: ModelText) -> PreparedPrompt:
    if draft.chat is not None:
        token_ids = model.encode_chat(draft.chat)
    else:
        token_ids = model.encode_text(text, control_tokens=draft.control_tokens_in_text)
    if token_ids is None:
        return PreparedPrompt(tokens=text_token_count(text), text=text)
    return PreparedPrompt(tokens=len(token_ids), token_ids=token_ids)
