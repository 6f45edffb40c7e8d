"""Prompts as token ids by a model's own files: its tokenizer.json and, beside it, its chat template and special tokens.

Token for token the ids of `transformers.apply_chat_template`, with one difference. There, text of a user that reads like a control token
(`<|im_end|>`) becomes that token, and forges the end of a turn. Here it stays text, unless the request asks for the tokens.

In messages, text that is or completes a control token is hidden while the template runs: each of its characters becomes a surrogate, which
no other text can hold. All control tokens that can be read then are the template's. Where text of a user holds some, a second tokenizer
encodes, which knows control tokens by secret names only, and the template's are renamed.
"""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.text.chat_template import DEFAULT, ChatTemplate

SPECIAL_TOKENS = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
"""Those that transformers gives to templates."""

FIRST_SURROGATE = 0xD800
SURROGATES = 2048


class PromptEncoder:
    """`tokenizer_path`: a tokenizer.json; `template_path`: a Jinja template, "" for the model's own. Raises ConfigError for files that
    cannot be read. May be used from several threads."""

    def __init__(self, tokenizer_path: str, template_path: str = "") -> None:
        try:
            self.tokenizer = Tokenizer.from_str(Path(tokenizer_path).read_text(encoding="utf-8"))
        except Exception as error:  # the library raises plain Exception
            raise ConfigError(f"models.tokenizer: {tokenizer_path} cannot be read as a tokenizer.json: {error}") from error
        self.tokenizer.no_truncation()  # as its training had it
        self.tokenizer.no_padding()
        special_tokens, sources = _beside(Path(tokenizer_path).parent)
        if template_path:
            try:
                sources = {DEFAULT: Path(template_path).read_text(encoding="utf-8")}
            except (OSError, UnicodeDecodeError) as error:
                raise ConfigError(f"models.chat_template: {template_path} cannot be read: {error}") from error
        self.template_source = "\n".join(sources.values())
        self._template = ChatTemplate(sources, special_tokens)
        added = [token for token in self.tokenizer.get_added_tokens_decoder().values() if token.content.strip()]
        self._controls = [token.content for token in added if token.special or self._template.writes(token.content)]
        unknown = {special_tokens.get("unk_token"), getattr(self.tokenizer.model, "unk_token", None)}  # any text may hold it
        self._control_ids = frozenset(self.tokenizer.token_to_id(token) for token in self._controls if token not in unknown)
        self._any_control = _any_of(self._controls)
        letters = sorted({letter for token in self._controls for letter in token})[:SURROGATES]
        self._hiding = {ord(letter): FIRST_SURROGATE + place for place, letter in enumerate(letters)}
        self._showing = {hidden: letter for letter, hidden in self._hiding.items()}
        self._heads = {token[:size] for token in self._controls for size in range(1, len(token))}
        self._tails = {token[size:] for token in self._controls for size in range(1, len(token))}
        self._piece_max = max((len(token) for token in self._controls), default=0) - 1

    def holds_control_text(self, text: str) -> bool:
        """Whether a text holds what reads like a control token. The first such text takes a second or so, to make a second tokenizer."""
        return self._any_control.search(text) is not None

    def encode_chat(self, chat: ChatPrompt) -> list[int]:
        """Raises InvalidRequest where the model's template refuses it."""
        if chat.control_tokens:
            return self._ids(self._template.render(chat))
        messages = tuple({**self._hide_all(message), "role": message["role"]} for message in chat.messages)
        hidden = self._template.render(replace(chat, messages=messages, variables=self._hide_all(chat.variables)))
        return self._encode(hidden, special_tokens=False)

    def encode_text(self, text: str, *, control_tokens: bool) -> list[int]:
        """A plain text, with the special tokens that the tokenizer adds to one."""
        if control_tokens:
            return self._ids(text, special_tokens=True)
        return self._encode(self._any_control.sub(self._hidden, text), special_tokens=True)

    def _encode(self, hidden: str, *, special_tokens: bool) -> list[int]:
        """A text in which all that is hidden is not a control token, and all that reads like one is."""
        text = self._shown(hidden)
        written = [found.span() for found in self._any_control.finditer(hidden)]
        if written == [found.span() for found in self._any_control.finditer(text)]:
            encoding = self.tokenizer.encode(text, add_special_tokens=special_tokens)
            ids: list[int] = encoding.ids
            found = sum(map(self._control_ids.__contains__, ids)) - sum(encoding.special_tokens_mask)  # less those that it adds
            if found <= len(written):  # a normalizer makes more, of text that reads otherwise
                return ids
        names, tokenizer = self._sealed
        sealed = self._shown(self._any_control.sub(lambda found: names[found[0]], hidden))
        return list(tokenizer.encode(sealed, add_special_tokens=special_tokens).ids)

    def _ids(self, text: str, *, special_tokens: bool = False) -> list[int]:
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=special_tokens).ids
        return ids

    def _hide(self, text: str) -> str:
        """A text with all control tokens in it hidden, and what at its ends may be a part of one."""
        text = self._any_control.sub(self._hidden, text)
        core = body = text.strip()
        if not core.isalnum() and any(core in token for token in self._controls):
            body = core.translate(self._hiding)
        for size in range(min(self._piece_max, len(body)), 0, -1):
            if body[:size] in self._tails:
                body = body[:size].translate(self._hiding) + body[size:]
            if body[-size:] in self._heads:
                body = body[:-size] + body[-size:].translate(self._hiding)
        return text.replace(core, body) if core else text

    def _hide_all(self, value: Any) -> Any:
        """A JSON value with all of its strings hidden. Keys keep their ends: templates sort and read them."""
        match value:
            case str():
                return self._hide(value)
            case Mapping():
                return {self._any_control.sub(self._hidden, key): self._hide_all(each) for key, each in value.items()}
            case list():
                return [self._hide_all(each) for each in value]
            case _:
                return value

    def _hidden(self, found: re.Match[str]) -> str:
        return found[0].translate(self._hiding)

    def _shown(self, text: str) -> str:
        return text if text.isascii() else text.translate(self._showing)

    @cached_property
    def _sealed(self) -> tuple[Mapping[str, str], Tokenizer]:
        """The tokenizer under which no text of a user is a control token, and its names of them."""
        secret = secrets.token_hex(8)
        names = {token: f"\U0010fffe{secret}.{place}\U0010ffff" for place, token in enumerate(self._controls)}
        document = json.loads(self.tokenizer.to_str())
        model = document["model"]
        vocabulary = model["vocab"]
        for token in document["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(token, token): number for token, number in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(token, token), score] for token, score in vocabulary]
        if model.get("unk_token") is not None:
            model["unk_token"] = names.get(model["unk_token"], model["unk_token"])
        tokenizer = Tokenizer.from_str(json.dumps(document))
        for token, name in names.items():
            assert tokenizer.token_to_id(name) == self.tokenizer.token_to_id(token), "a token keeps its id under another name"
        return names, tokenizer


def _any_of(tokens: Sequence[str]) -> re.Pattern[str]:
    """Finds the longest of them at the leftmost place, as tokenizers do."""
    return re.compile("|".join(re.escape(token) for token in sorted(tokens, key=len, reverse=True)) or r"(?!)")


def _beside(folder: Path) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """Special tokens and chat templates, from the files that lie beside a tokenizer.json, as transformers reads them."""
    config = {**_json(folder / "special_tokens_map.json"), **_json(folder / "tokenizer_config.json")}
    said = {name: config.get(name) for name in SPECIAL_TOKENS}
    tokens = {name: each["content"] if isinstance(each, dict) else each for name, each in said.items() if each}
    named = config.get("chat_template") or {}
    if isinstance(named, list):
        named = {each["name"]: each["template"] for each in named}
    sources: dict[str, str] = {DEFAULT: named} if isinstance(named, str) else dict(named)
    sources |= {path.stem: text for path in sorted((folder / "additional_chat_templates").glob("*.jinja")) for text in _text(path)}
    for text in _text(folder / "chat_template.jinja"):
        sources[DEFAULT] = text
    return tokens, sources


def _json(path: Path) -> dict[str, Any]:
    for text in _text(path):
        try:
            found = json.loads(text)
        except ValueError as error:
            raise ConfigError(f"models.tokenizer: {path} is not JSON: {error}") from error
        if isinstance(found, dict):
            return found
    return {}


def _text(path: Path) -> Iterator[str]:
    """The text of a file, if it is there."""
    try:
        yield path.read_text(encoding="utf-8")
    except FileNotFoundError:
        return
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"models.tokenizer: {path} cannot be read: {error}") from error
