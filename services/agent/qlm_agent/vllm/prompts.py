"""Prompts as tokens, and tokens as text, by the model's own tokenizer: in the engine's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qlm_core.simulated_model import chat_text

REPLACEMENT = "\ufffd"
"""What a decoder makes of bytes that are no character, or none yet."""

CHARACTER_TOKENS_MAX = 4
"""Most tokens of one character, a byte each: what ends in no character after so many is not the beginning of one."""


class ModelText:
    """`folder`: of the weights; `tokenizer`: as vLLM loaded it; `chat_template`: a path, "" for the model's own."""

    def __init__(self, folder: Path, tokenizer: Any, chat_template: str) -> None:
        from tokenizers import Tokenizer

        self._tokenizer = tokenizer
        self._template = Path(chat_template).read_text(encoding="utf-8") if chat_template else None
        self._fast = Tokenizer.from_file(str(folder / "tokenizer.json"))
        self.eos_ids = frozenset(eos_ids(folder, tokenizer.eos_token_id))

    def text_prompt(self, text: str) -> list[int]:
        ids: list[int] = self._fast.encode(text, add_special_tokens=True).ids
        return ids

    def chat_prompt(self, messages: Sequence[tuple[str, str]]) -> list[int]:
        """As the gateway counts it: its rendering, without special tokens but those of the template."""
        turns = [{"role": role, "content": content} for role, content in messages]
        if self._template is None and self._tokenizer.chat_template is None:
            text = chat_text(messages)
        else:
            text = self._tokenizer.apply_chat_template(turns, chat_template=self._template, add_generation_prompt=True, tokenize=False)
        ids: list[int] = self._fast.encode(text, add_special_tokens=False).ids
        return ids

    def text_of(self, before: Sequence[int]) -> Callable[[int], str | None]:
        """Decodes tokens that come after others, one by one; None while a character is not complete."""
        return NewText(lambda ids: self._fast.decode(ids, skip_special_tokens=True), before).feed


class NewText:
    """What each token adds to the text of those `before` it. A decoder needs some of the tokens before a token, and may read them otherwise
    with it than without it: then all is new from where the two texts part. (The library's own stream raises there, and tells the text of
    all `before` as new where that ends within a character.)"""

    def __init__(self, decode: Callable[[Sequence[int]], str], before: Sequence[int]) -> None:
        self._decode = decode
        self._ids = list(before)
        self._told = len(self._ids)  # of which `_text` is the text
        self._text = decode(self._ids)

    def feed(self, token: int) -> str | None:
        self._ids.append(token)
        text = self._decode(self._ids)
        new = text[_same(self._text, text) :]
        if (not new or text.endswith(REPLACEMENT)) and len(self._ids) - self._told < CHARACTER_TOKENS_MAX:
            return None
        del self._ids[: self._told]
        self._told = len(self._ids)
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
