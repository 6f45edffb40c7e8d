"""Builds the body of a completion from a run, in the fields of OpenAI and, beyond those, of vLLM."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from qlm_agent.engines.openai.errors import NotServable
from qlm_agent.engines.port import Sampling
from qlm_core.vocabulary.chat import ChatPrompt

PLAIN = Sampling()


def completion_body(
    remote_model: str, prompt: str | Sequence[int] | ChatPrompt, sampling: Sampling, known: Collection[str]
) -> dict[str, object]:
    """All but `max_tokens`. `known`: the parameters beyond OpenAI's that the server knows. Stop strings are not sent: the agent matches
    them, across interrupted answers too. Raises NotServable."""
    body: dict[str, object] = {"model": remote_model, "stream": True, "stream_options": {"include_usage": True}}
    body |= chat_body(prompt) if isinstance(prompt, ChatPrompt) else {"prompt": prompt}
    ids = not isinstance(prompt, str | ChatPrompt)
    if ids:
        body["return_token_ids"] = True
    if sampling.logprobs is not None:
        if not ids:
            raise NotServable("its server returns only text: logprobs need agent.openai.output=tokens")
        body |= {"logprobs": sampling.logprobs, "return_tokens_as_token_ids": True}
    for name in ("temperature", "top_p", "seed"):
        if (value := getattr(sampling, name)) is not None:
            body[name] = value
    for name in ("presence_penalty", "frequency_penalty"):
        if value := getattr(sampling, name):
            body[name] = value
    used = [name for name in ("top_k", "min_p", "repetition_penalty", "ignore_eos") if getattr(sampling, name) != getattr(PLAIN, name)]
    body |= {name: getattr(sampling, name) for name in used}
    if ids:  # without them vLLM applies the model's generation_config.json, while 0 means none in QLM
        body |= {name: getattr(sampling, name) for name in ("top_k", "min_p") if name in known}
    if structure := _structure(sampling):
        used.append("structured_outputs")
        body["structured_outputs"] = structure
    if unknown := [name for name in used if name not in known]:
        raise NotServable(f"its server does not know {', '.join(unknown)} (agent.openai.parameters)")
    return body


def chat_body(chat: ChatPrompt) -> dict[str, object]:
    """A chat in the fields of OpenAI and, beyond those, of vLLM. A server applies rules of its own to control tokens in text."""
    body: dict[str, object] = {"messages": list(chat.messages)}
    variables = dict(chat.variables)
    if "tools" in variables:
        body["tools"] = variables.pop("tools")
    if chat.continue_final_message:
        body |= {"continue_final_message": True, "add_generation_prompt": False}
    if variables:
        body["chat_template_kwargs"] = variables
    return body


def _structure(sampling: Sampling) -> dict[str, object]:
    if sampling.json_schema:
        try:
            return {"json": json.loads(sampling.json_schema)}
        except ValueError as error:
            raise NotServable(f"json_schema is not JSON: {error}") from error
    return {"regex": sampling.regex} if sampling.regex else {}
