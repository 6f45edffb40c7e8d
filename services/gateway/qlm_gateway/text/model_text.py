"""Text and tokens of a model: prompts in, output out. Two kinds, one port.

`exact_text.ExactText` uses the model's own tokenizer.json (the `tokenizers` library) and its chat template. `ApproximateText` is for
simulated models, which have none: a prompt counts as UTF-8 bytes / 4 rounded up, and output token 123 reads as " t123".
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import ConfigError

CONTEXT_TOKENS = 8
"""Tokens before a piece of output that its text may depend on: a character has at most four byte tokens."""
PIECE_TOKENS = 4_096
"""Most tokens that are decoded at once on the event loop: about 1 ms."""


class Detokenizer(Protocol):
    """Turns one output into text, piece by piece; the pieces in sequence are the text of the whole."""

    def feed(self, token_ids: Sequence[int]) -> str:
        """The text that these next tokens complete."""

    def flush(self) -> str:
        """Returns the rest at the end: an incomplete character, as replacement characters."""


class ModelText(Protocol):
    """`exact`: whether tokens are counted with the model's tokenizer. `token_bytes_max`: see ModelEntry. `chat_template`: its source, ""
    without one."""

    @property
    def exact(self) -> bool: ...

    @property
    def token_bytes_max(self) -> int: ...

    @property
    def chat_template(self) -> str: ...

    def encode_text(self, text: str, *, control_tokens: bool) -> list[int] | None:
        """Token ids of a text prompt; None where only their number is known."""

    def encode_chat(self, chat: ChatPrompt) -> list[int] | None:
        """As `encode_text`. Raises InvalidRequest where the model's template refuses the chat."""

    def holds_control_text(self, text: str) -> bool:
        """Whether it holds what reads like a control token: the first such text of a model takes long."""

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        """For output that follows these tokens, the last `CONTEXT_TOKENS` of the tokens before."""

    def decode(self, token_ids: Sequence[int]) -> str:
        """A whole output as text."""


class ApproximateText:
    """See above."""

    exact = False
    token_bytes_max = 4
    chat_template = ""

    def encode_text(self, text: str, *, control_tokens: bool) -> list[int] | None:
        return None

    def encode_chat(self, chat: ChatPrompt) -> list[int] | None:
        return None

    def holds_control_text(self, text: str) -> bool:
        return False

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        return _ApproximateDetokenizer()

    def decode(self, token_ids: Sequence[int]) -> str:
        return "".join([f" t{token}" for token in token_ids])


class _ApproximateDetokenizer:
    def feed(self, token_ids: Sequence[int]) -> str:
        return "".join([f" t{token}" for token in token_ids])

    def flush(self) -> str:
        return ""


async def decode_in_pieces(text: ModelText, token_ids: Sequence[int]) -> str:
    """A whole output as text; others of the event loop take their turn between its pieces. (A thread would not help: the tokenizer holds
    the interpreter's lock.)"""
    if len(token_ids) <= PIECE_TOKENS:
        return text.decode(token_ids)
    detokenizer = text.detokenizer()
    pieces = []
    for first in range(0, len(token_ids), PIECE_TOKENS):
        pieces.append(detokenizer.feed(token_ids[first : first + PIECE_TOKENS]))
        await asyncio.sleep(0)
    return "".join([*pieces, detokenizer.flush()])


def open_text(tokenizer_path: str, template_path: str) -> ModelText:
    """The text of a model by its settings; "" for a path that is not set. Raises ConfigError."""
    if not tokenizer_path:
        if template_path:
            raise ConfigError(f"models.chat_template: {template_path} needs the model's models.tokenizer too")
        return ApproximateText()
    # Only gateways of real models need the libraries behind it.
    try:
        from qlm_gateway.text.exact import ExactText
    except ImportError as error:
        raise ConfigError(f"models.tokenizer: {tokenizer_path} needs {error.name}: pip install qlm-serving[gateway]") from error
    return ExactText(tokenizer_path, template_path)
