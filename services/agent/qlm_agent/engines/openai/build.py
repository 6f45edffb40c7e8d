"""Builds the engine from the settings."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping
from urllib.parse import urlsplit

from qlm_agent.engines.openai.engine import OpenAiEngine
from qlm_agent.engines.openai.run import RemoteModel
from qlm_agent.engines.openai.server import OpenAiServer
from qlm_agent.engines.openai.settings import OpenAiModelSettings, OpenAiSettings
from qlm_core.vocabulary.errors import ConfigError
from qlm_core.vocabulary.model import ModelSpec


def openai_engine(
    settings: OpenAiSettings,
    models: Mapping[str, ModelSpec],
    kv_capacity_tokens: Mapping[str, int],
    batch_max: int,
    *,
    clock: Callable[[], float] = time.monotonic,
) -> OpenAiEngine:
    """`models`: the agent's models; `kv_capacity_tokens`: of each on its GPUs by its profile, 0 for unknown. Raises ConfigError for
    settings that do not fit each other."""
    unknown = [name for name in settings.models if name not in models]
    if unknown:
        raise ConfigError(f"agent.openai.models: {', '.join(unknown)} not served by this agent; may be {', '.join(models)}")
    places = {name: settings.models.get(name) or OpenAiModelSettings() for name in models}
    urls = {name: (place.base_url or settings.base_url).rstrip("/") for name, place in places.items()}
    if any(url.endswith("/v1") for url in urls.values()):
        raise ConfigError("agent.openai.base_url: without /v1, which each call adds; the same in agent.openai.models")
    if settings.sleep and len(set(urls.values())) < len(urls):
        raise ConfigError("agent.openai.sleep: each model needs a server of its own (agent.openai.models.NAME.base_url)")
    api_key = os.environ.get(settings.api_key_env, "").strip() if settings.api_key_env else ""  # files of secrets end with a newline
    if settings.api_key_env and not api_key:
        raise ConfigError(f"agent.openai.api_key_env: the environment has no {settings.api_key_env}")
    if not api_key.isprintable():
        raise ConfigError(f"agent.openai.api_key_env: {settings.api_key_env} has characters that no HTTP header may have")
    if api_key and any(urlsplit(url).username is not None for url in urls.values()):
        raise ConfigError("agent.openai.base_url: it names a user, and api_key_env a key; a server takes one of them")
    servers = {url: OpenAiServer(url, api_key, settings) for url in urls.values()}
    remotes = {
        name: RemoteModel(
            name=name,
            remote=place.remote or name,
            server=servers[urls[name]],
            context_tokens=models[name].context_tokens_max,
            text_output=settings.output == "text",
            continues_chats=settings.continues_chats,
            parameters=frozenset(settings.parameters),
            ends=set(),
        )
        for name, place in places.items()
    }
    return OpenAiEngine(remotes, settings, kv_capacity_tokens=kv_capacity_tokens, batch_max=batch_max, clock=clock)
