"""Text of a model by its own files: `qlm_process.text.prompt_encoding`, and the way back."""

from __future__ import annotations

from collections.abc import Sequence

from tokenizers import Tokenizer

from qlm_core.vocabulary.chat import ChatPrompt
from qlm_gateway.text.model_text import CONTEXT_TOKENS, Detokenizer
from qlm_process.text.prompt_encoding import PromptEncoder

REPLACEMENT = "\ufffd"
"""Stands in decoded text for bytes that are no character yet."""

CHARACTER_TOKENS_MAX = 4
"""Most tokens of one character: a byte each."""


class ExactText:
    """A model's tokenizer.json and chat template, "" for its own. Raises ConfigError where they cannot be read."""

    exact = True

    def __init__(self, tokenizer_path: str, template_path: str) -> None:
        self._encoder = PromptEncoder(tokenizer_path, template_path)
        self._tokenizer = self._encoder.tokenizer
        self.chat_template = self._encoder.template_source
        # Normalizers may shrink text, so a token can stand for more bytes than it has: leave a factor for that.
        self.token_bytes_max = 4 * max((len(token.encode()) for token in self._tokenizer.get_vocab()), default=4)

    def encode_text(self, text: str, *, control_tokens: bool) -> list[int] | None:
        return self._encoder.encode_text(text, control_tokens=control_tokens)

    def encode_chat(self, chat: ChatPrompt) -> list[int] | None:
        return self._encoder.encode_chat(chat)

    def holds_control_text(self, text: str) -> bool:
        return self._encoder.holds_control_text(text)

    def detokenizer(self, before: Sequence[int] = ()) -> Detokenizer:
        return _ExactDetokenizer(self._tokenizer, before)

    def decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(list(token_ids))
        return text


WINDOW_TOKENS_MAX = 4 * CONTEXT_TOKENS
"""A longer window without a character at its end holds none that more tokens could complete."""


class _ExactDetokenizer:
    """Decodes a short window of the last tokens, and gives what the new ones add to it: decoders strip or add blanks at the start of a
    text and need several tokens for one character, so tokens cannot be decoded one by one. Some make replacement characters of all bytes
    in a row when not all of them are characters, so a window begins with a character, and one that is incomplete is left out at its end."""

    def __init__(self, tokenizer: Tokenizer, before: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window: list[int] = []
        self._given = ""
        self._begin(list(before[-CONTEXT_TOKENS:]))

    def feed(self, token_ids: Sequence[int]) -> str:
        self._window.extend(token_ids)
        text, left_out = self._complete(self._window)
        # A decoder that changed what it said before has nothing new to add until it is longer.
        new = text[len(self._given) :]
        if new:
            self._given = text
        if len(self._window) > 2 * CONTEXT_TOKENS and left_out is not None:
            self._begin(self._window[-CONTEXT_TOKENS - left_out :])
        elif len(self._window) > WINDOW_TOKENS_MAX:
            new += self._give_up()
        return new

    def _give_up(self) -> str:
        """The text of a window of bytes that are no characters, except those at its end that may be the beginning of one."""
        whole = self._decode(self._window)
        for kept in (*range(CHARACTER_TOKENS_MAX - 1, CONTEXT_TOKENS), CHARACTER_TOKENS_MAX - 1):
            text = self._decode(self._window[:-kept])
            if text + self._decode(self._window[-kept:]) == whole:
                break  # no character was cut
        new, self._window, self._given = text[len(self._given) :], self._window[-kept:], ""
        return new

    def flush(self) -> str:
        return self._decode(self._window)[len(self._given) :]

    def _begin(self, window: list[int]) -> None:
        """With these tokens, which may begin within a character, as given."""
        self._window = window
        self._given, _ = self._complete(window)
        for left_out in range(1, CHARACTER_TOKENS_MAX):
            if self._given and not self._given.startswith(REPLACEMENT):
                return
            given, _ = self._complete(window[left_out:])
            if given and not given.startswith(REPLACEMENT):
                self._window, self._given = window[left_out:], given

    def _decode(self, token_ids: Sequence[int]) -> str:
        text: str = self._tokenizer.decode(token_ids)
        return text

    def _complete(self, token_ids: Sequence[int]) -> tuple[str, int | None]:
        """Their text without an incomplete character at its end, and how many tokens that has; None where what is at the end is no
        beginning of a character."""
        text = self._decode(token_ids)
        if not text.endswith(REPLACEMENT):
            return text, 0
        for left_out in range(1, CHARACTER_TOKENS_MAX):
            shorter = self._decode(token_ids[:-left_out])
            if shorter and not shorter.endswith(REPLACEMENT):
                return shorter, left_out
        return text.rstrip(REPLACEMENT), None
