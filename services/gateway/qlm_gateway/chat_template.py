"""Chat messages as the text that a model was trained on: its own Jinja template, in the sandbox of the jinja2 library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

from jinja2 import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

from qlm_core.errors import ConfigError, invalid_field
from qlm_core.simulated_model import chat_text


class ChatTemplate:
    """A template file, as in a model's tokenizer_config.json; "": the plain rendering of `qlm_core.simulated_model.chat_text`.

    Templates see `messages` (role, content), `add_generation_prompt` (true), `bos_token` and `eos_token` (empty: the tokenizer adds
    them) and `raise_exception`. Raises ConfigError where the file cannot be read or compiled.
    """

    def __init__(self, path: str) -> None:
        self._template = None
        if not path:
            return
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
        environment.globals["raise_exception"] = _refuse
        try:
            self._template = environment.from_string(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, TemplateError) as error:
            raise ConfigError(f"models.chat_template: {path} cannot be read as a Jinja template: {error}") from error

    def render(self, messages: Sequence[tuple[str, str]]) -> str:
        """The prompt, up to where the assistant's answer begins. Raises InvalidRequest where the template refuses the messages."""
        if self._template is None:
            return chat_text(messages)
        turns = [{"role": role, "content": content} for role, content in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, bos_token="", eos_token="")
        except TemplateError as error:
            raise invalid_field("chat.messages", f"what the model's chat template takes ({error})") from error


def _refuse(message: str) -> NoReturn:
    raise TemplateError(message)
