"""Asks OpenAI-compatible servers which models they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from qlm_agent.engines.openai.errors import ServerError
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.openai.settings import OpenAiSettings

TIMEOUT_S = 5.0
"""Deadline of each call to a server."""
MODELS_MAX = 64
"""Most models of one server; others are ignored."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundModel:
    """A model as its server lists it. `context_tokens`: of prompt and output together, 0 where the server reports none. `tokenizer`: path
    of its tokenizer.json where the server's weights lie on this machine, else ""."""

    name: str
    context_tokens: int = 0
    tokenizer: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundServer:
    """`is_vllm`: it answers vLLM's `/version`."""

    url: str
    models: tuple[FoundModel, ...]
    is_vllm: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class MissingServer:
    """A server that serves nothing now, and why."""

    url: str
    reason: str


async def discover(urls: Sequence[str], api_key: str) -> tuple[list[FoundServer], list[MissingServer]]:
    """Each server as it is now, in the given order. Takes at most some TIMEOUT_S."""
    answers = await asyncio.gather(*(_ask(url, api_key) for url in urls))
    return [each for each in answers if isinstance(each, FoundServer)], [each for each in answers if isinstance(each, MissingServer)]


async def _ask(url: str, api_key: str) -> FoundServer | MissingServer:
    server = OpenAiServer(url, api_key, OpenAiSettings(connect_timeout_s=TIMEOUT_S, call_timeout_s=TIMEOUT_S))
    await server.open()
    try:
        models = [_model(name, entry) for name, entry in list((await server.models()).items())[:MODELS_MAX]]
        if not models:
            return MissingServer(url=url, reason="it lists no models")
        return FoundServer(url=url, models=tuple(models), is_vllm=await server.is_vllm())
    except ServerError as error:
        return MissingServer(url=url, reason=str(error))
    finally:
        await server.close()


def _model(name: str, entry: Any) -> FoundModel:
    """`entry`: what /v1/models says; vLLM adds `max_model_len` and `root`, the folder or the hub's name of the weights."""
    known = entry if isinstance(entry, dict) else {}
    context, root = known.get("max_model_len"), known.get("root")
    tokenizer = Path(root) / "tokenizer.json" if isinstance(root, str) and root.startswith("/") else None
    return FoundModel(
        name=name,
        context_tokens=context if isinstance(context, int) and context > 0 else 0,
        tokenizer=str(tokenizer) if tokenizer is not None and tokenizer.is_file() else "",
    )
