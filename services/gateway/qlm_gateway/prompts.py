"""From a checked prompt to what is stored: text of models with a tokenizer becomes token ids, chats become one text."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from qlm_gateway.drafts import RequestDraft
from qlm_gateway.model_text import ModelText

INLINE_BYTES_MAX = 16_384
"""Longer texts are tokenized in a thread: tens of milliseconds of the event loop are everybody's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedPrompt:
    """`tokens`: how many. One of `token_ids` and `text` is set: what the agent gets."""

    tokens: int
    token_ids: list[int] | None = None
    text: str | None = None


async def prepare(draft: RequestDraft, model: ModelText) -> PreparedPrompt:
    """Counts and, where the model has a tokenizer, tokenizes. Raises InvalidRequest where a chat template refuses the messages."""
    if draft.token_ids is not None:
        return PreparedPrompt(tokens=len(draft.token_ids), token_ids=list(draft.token_ids))
    size = len(draft.text) if draft.text is not None else sum(len(content) for _, content in draft.chat or ())
    if model.exact and size > INLINE_BYTES_MAX:
        return await asyncio.to_thread(_prepare_text, draft, model)
    return _prepare_text(draft, model)


def _prepare_text(draft: RequestDraft, model: ModelText) -> PreparedPrompt:
    # A chat template writes the special tokens itself; a plain text gets those that the tokenizer adds.
    text = draft.text if draft.text is not None else model.render(draft.chat or ())
    token_ids = model.encode(text, special_tokens=draft.text is not None)
    if token_ids is None:
        return PreparedPrompt(tokens=model.count(text), text=text)
    return PreparedPrompt(tokens=len(token_ids), token_ids=token_ids)
