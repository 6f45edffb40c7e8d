"""Prompts as tokens, and tokens as text, by the model's own tokenizer: in the engine's process."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from qlm_core.simulated_model import chat_text


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
        from tokenizers.decoders import DecodeStream

        stream = DecodeStream(ids=list(before), skip_special_tokens=True)
        return lambda token: stream.step(self._fast, token)


def eos_ids(folder: Path, of_tokenizer: int | None) -> set[int]:
    """The tokens that end an answer: of the tokenizer and of generation_config.json."""
    found = set() if of_tokenizer is None else {of_tokenizer}
    try:
        said = json.loads((folder / "generation_config.json").read_text(encoding="utf-8")).get("eos_token_id")
    except (OSError, ValueError, AttributeError):
        return found
    return found | {each for each in (said if isinstance(said, list) else [said]) if isinstance(each, int)}
