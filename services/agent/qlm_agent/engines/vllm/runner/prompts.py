"""Prompts as tokens, and tokens as text, by the model's own tokenizer: in the engine's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from qlm_agent.engines.port import TextPrompt
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_process.text.prompt_encoding import PromptEncoder

REPLACEMENT = "\ufffd"
"""A decoder's output for bytes that are no character, or none yet."""

CHARACTER_TOKENS_MAX = 4
"""Most tokens of one character, a byte each: more tokens without a character are not the beginning of one."""


class ModelText:
    """`folder`: of the weights; `eos_id`: of vLLM's tokenizer; `chat_template`: a path, "" for the model's own."""

    def __init__(self, folder: Path, eos_id: int | None, chat_template: str) -> None:
        self._encoder = PromptEncoder(str(folder / "tokenizer.json"), chat_template)
        self.eos_ids = frozenset(eos_ids(folder, eos_id))

    def text_prompt(self, prompt: TextPrompt) -> list[int]:
        return self._encoder.encode_text(prompt.text, control_tokens=prompt.control_tokens)

    def chat_prompt(self, prompt: ChatPrompt) -> list[int]:
        return self._encoder.encode_chat(prompt)

    def text_of(self, before: Sequence[int]) -> Callable[[int], str | None]:
        """Decodes tokens after `before`, one by one; None while a character is incomplete."""
        return NewText(lambda ids: self._encoder.tokenizer.decode(ids, skip_special_tokens=True), before).feed


class NewText:
    """The text that each token adds to the text of `before`. A decoder needs some of the preceding tokens, and may read them differently
    with the token: then the new text begins at the first difference. (The library's own stream raises there, and returns the text of all
    `before` as new if that ends within a character.)"""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(before)
        self._decoded = len(self._ids)  # count of the ids that `_text` decodes
        self._text = decode(self._ids)

    def feed(self, token: int) -> str | None:
        self._ids.append(token)
        text = self._decode(self._ids)
        new = text[_same(self._text, text) :]
        if (not new or text.endswith(REPLACEMENT)) and len(self._ids) - self._decoded < CHARACTER_TOKENS_MAX:
            return None
        del self._ids[: self._decoded]
        self._decoded = len(self._ids)
        self._text = self._decode(self._ids)
        return new or None


def _same(one: str, other: str) -> int:
    """So many characters at the start of both are the same."""
    if other.startswith(one):
        return len(one)
    return next((at for at, (mine, its) in enumerate(zip(one, other, strict=False)) if mine != its), min(len(one), len(other)))


def eos_ids(folder: Path, of_tokenizer: int | None) -> set[int]:
    """The tokens that end an answer: of the tokenizer, and of generation_config.json or, where there is none, of config.json."""
    found = set() if of_tokenizer is None else {of_tokenizer}
    name = "generation_config.json" if (folder / "generation_config.json").exists() else "config.json"
    try:
        said = json.loads((folder / name).read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return found
    return found | {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, int)}
