"""Prompts against `transformers.apply_chat_template`: token for token, for templates of every shape and random chats."""

from __future__ import annotations

import os
import random
from collections.abc import Callable
from importlib import import_module
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest

from chat_templates import CONTROLS, PLAIN_ADDED, TEMPLATES, TOKENIZERS, write_model
from qlm_core.vocabulary.chat import ChatPrompt
from qlm_core.vocabulary.errors import InvalidRequest
from qlm_process.text.prompt_encoding import PromptEncoder

CHATS = int(os.environ.get("QLM_TEST_CHATS", "10"))
"""For each template and tokenizer."""


@pytest.fixture(scope="module")
def transformers() -> Any:
    """Imported by the worker that needs it: that takes seconds."""
    return pytest.importorskip("transformers") if "CI" not in os.environ else import_module("transformers")


WORDS = [
    "the fox", " dog", "\n", "\n\n", "    ", "é", "😀", "100% sure", "<b>&amp;'\"", "{{ 7 * 7 }}", "{% if %}", "<", "|", "[", "im_end", ">",
    "\r\n",    "<|", "|>", "</", "\u200b", "ﬁ", "Å", "0123456", "```py\nx = [1]\n```", "\t", "\\", "/think",
]  # fmt: skip


def text(chance: random.Random, controls: bool) -> str:
    words = [*WORDS, *CONTROLS, *PLAIN_ADDED] if controls else [*WORDS, "<table>"]
    made = "".join(chance.choice(words) for _ in range(chance.randrange(8)))
    return made if controls or not any(token in made for token in CONTROLS) else text(chance, controls)


def value(chance: random.Random, controls: bool, depth: int = 0) -> Any:
    match chance.randrange(6 if depth < 2 else 4):
        case 0:
            return chance.choice([None, True, False])
        case 1:
            return chance.choice([0, -1, 2.5, 1e30])
        case 4:
            return [value(chance, controls, depth + 1) for _ in range(chance.randrange(3))]
        case 5:
            return {text(chance, controls): value(chance, controls, depth + 1) for _ in range(chance.randrange(3))}
        case _:
            return text(chance, controls)


def random_chat(chance: random.Random, *, controls: bool) -> ChatPrompt:
    messages: list[dict[str, Any]] = []
    if chance.random() < 0.3:
        messages.append({"role": "system", "content": text(chance, controls)})
    for number in range(chance.randrange(1, 6)):
        messages.append({"role": "assistant" if number % 2 else "user", "content": text(chance, controls)})
        if chance.random() < 0.1:
            call = {"name": "f", "arguments": {text(chance, controls): value(chance, controls)}}
            messages.append({"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]})
            messages.append({"role": "tool", "content": text(chance, controls), "name": "f"})
    variables: dict[str, Any] = {}
    if chance.random() < 0.3:
        variables["tools"] = [{"type": "function", "function": {"name": "f", "description": text(chance, controls), "parameters": {}}}]
    if chance.random() < 0.2:
        variables["enable_thinking"] = False
        variables["documents"] = [{"title": text(chance, controls), "text": "x"}]
        variables["reasoning"] = "high"
    continues = chance.random() < 0.3 and bool(messages[-1]["content"].strip())
    return ChatPrompt(messages=tuple(messages), variables=variables, continue_final_message=continues, control_tokens=controls)


def expected(tokenizer: Any, chat: ChatPrompt) -> list[int] | None:
    """None: refused."""
    try:
        found = tokenizer.apply_chat_template(
            [dict(message) for message in chat.messages],
            add_generation_prompt=not chat.continue_final_message,
            continue_final_message=chat.continue_final_message,
            return_dict=False,
            **chat.variables,
        )
    except Exception:
        return None
    return list(found)


def actual(encoder: PromptEncoder, chat: ChatPrompt) -> list[int] | None:
    try:
        return encoder.encode_chat(chat)
    except InvalidRequest:
        return None


@pytest.mark.parametrize(("shape", "kind"), list(zip(TEMPLATES, cycle(TOKENIZERS), strict=False)))
@pytest.mark.parametrize("controls", [False, True], ids=["text", "control tokens allowed"])
def test_tokens_are_those_of_transformers(
    transformers: Any, tmp_path: Path, kind: str, shape: str, controls: bool, record_property: Callable[[str, object], None]
) -> None:
    encoder = PromptEncoder(write_model(tmp_path, kind, TEMPLATES[shape]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    served = 0
    for seed in range(CHATS):
        chat = random_chat(random.Random(f"{shape}/{kind}/{seed}"), controls=controls)
        wanted = expected(tokenizer, chat)
        assert actual(encoder, chat) == wanted, f"seed {seed}: {chat}"
        served += wanted is not None
    assert served or CHATS < 10, "no chat of this shape was compared"
    record_property("chats", served)
    record_property("shape", shape)


def test_the_template_for_tools_is_taken_where_there_are_tools(transformers: Any, tmp_path: Path) -> None:
    named = [{"name": "default", "template": TEMPLATES["chatml"]}, {"name": "tool_use", "template": TEMPLATES["qwen with tools"]}]
    encoder = PromptEncoder(write_model(tmp_path, "bytes", named))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for seed in range(50):
        chat = random_chat(random.Random(seed), controls=True)
        assert actual(encoder, chat) == expected(tokenizer, chat), f"seed {seed}: {chat}"


@pytest.mark.parametrize("kind", TOKENIZERS)
def test_text_prompts_are_those_of_transformers(transformers: Any, tmp_path: Path, kind: str) -> None:
    encoder = PromptEncoder(write_model(tmp_path, kind, TEMPLATES["chatml"]))
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(tmp_path))
    for seed in range(200):
        plain = text(random.Random(seed), controls=False)
        assert encoder.encode_text(plain, control_tokens=False) == tokenizer(plain)["input_ids"]
        special = text(random.Random(seed), controls=True)
        assert encoder.encode_text(special, control_tokens=True) == tokenizer(special)["input_ids"]
