"""Chats as the text that a model was trained on: its own Jinja templates, by the rules of transformers
(`transformers.utils.chat_template_utils.render_jinja_template`), in the sandbox of the jinja2 library."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import ConfigError, invalid_field

DEFAULT, WITH_TOOLS = "default", "tool_use"
"""The names that transformers knows, of models with several templates."""

CONTINUED = "CONTINUE_FINAL_MESSAGE_TAG "


class ChatTemplate:
    """`sources`: Jinja templates by name; none: `ChatPrompt.plain_text`. `special_tokens`: variables
    such as `bos_token`. `now`: the local time. Raises ConfigError for a template that does not compile."""

    def __init__(
        self,
        sources: Mapping[str, str],
        special_tokens: Mapping[str, str],
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        self._special_tokens = special_tokens
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _refuse
        environment.globals["strftime_now"] = lambda form: now().strftime(form)
        try:
            self._templates = {name: environment.from_string(source) for name, source in sources.items()}
            if self._templates and DEFAULT not in self._templates:
                raise TemplateError(f"none of them is named {DEFAULT}")
            self._read = {text for source in sources.values() for text in _read_strings(environment.parse(source))}
        except TemplateError as error:
            raise ConfigError(f"models.chat_template: cannot be read as a Jinja template: {error}") from error
        self._sources = sources

    def writes(self, token: str) -> bool:
        """Whether a template holds this token for its output, and never compares messages with it, as some do with "</think>"."""
        return any(token in source for source in self._sources.values()) and not any(token in read for read in self._read)

    def render(self, chat: ChatPrompt) -> str:
        """The prompt, up to where the answer begins. Raises InvalidRequest where the template refuses the chat."""
        if not self._templates:
            return chat.plain_text()
        last = chat.messages[-1]["content"]
        messages = list(chat.messages)
        if chat.continue_final_message:
            messages[-1] = {**messages[-1], "content": last + CONTINUED}
        variables: dict[str, Any] = {
            **self._special_tokens,
            "tools": None,
            "documents": None,
            **chat.variables,
            "messages": messages,
            "add_generation_prompt": not chat.continue_final_message,
        }
        name = WITH_TOOLS if variables["tools"] is not None and WITH_TOOLS in self._templates else DEFAULT
        try:
            text = self._templates[name].render(variables)
        except Exception as error:  # a template may raise whatever its expressions do
            raise invalid_field("chat.messages", f"what the model's chat template takes ({error})") from error
        if not chat.continue_final_message:
            return text
        at = text.rfind(CONTINUED.strip())
        if at < 0 or last.strip() not in text or "content" not in self._sources[name]:
            raise invalid_field("chat.continue_final_message", "for models whose chat template keeps the last message")
        return text[:at] if text[at:].startswith(CONTINUED) else text[:at].rstrip()  # the template may have trimmed it


class _Generation(Extension):
    """`{% generation %}`: marks answers for training. As transformers has it, the body is a scope of its own."""

    tags = {"generation"}  # noqa: RUF012 (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Callable[[], str]) -> str:
        return caller()


def _to_json(
    value: object, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    """jinja2's own filter escapes HTML. Surrogates stay: they stand for text that `qlm_process.text.prompt_encoding` has hidden."""
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return re.sub(r"[^\x00-\x7f\ud800-\udfff]", lambda found: json.dumps(found[0])[1:-1], text) if ensure_ascii else text


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)


def _read_strings(template: nodes.Template) -> Iterator[str]:
    """Strings that a template compares with, or gives to methods and filters: those that it looks for in messages."""
    readers: list[nodes.Node] = list(template.find_all((nodes.Compare, nodes.Filter, nodes.Test)))
    readers += [call for call in template.find_all(nodes.Call) if isinstance(call.node, nodes.Getattr)]
    for reader in readers:
        for node in reader.iter_child_nodes(exclude=("node",)):
            for const in [node] if isinstance(node, nodes.Const) else node.find_all(nodes.Const):
                if isinstance(const.value, str):
                    yield const.value
