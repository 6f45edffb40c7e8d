"""What a server must be configured to, for a queue's durability to hold there."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis.asyncio as redis
import structlog

from qlm_core.errors import ConfigError, Unavailable
from qlm_queue.redis_link import RedisLink
from qlm_queue.values import Durability

_APPENDFSYNC_ALLOWED = {Durability.PROCESS: ("no", "always"), Durability.DISK: ("always",)}


@contextmanager
def refusals_are_config_errors() -> Iterator[None]:
    """Of a server that answers, but never will to these settings: a wrong password, a database or a protocol that it does not have."""
    try:
        yield
    except redis.ResponseError as error:
        raise ConfigError(f"queue.url: the server refuses it: {error}") from error
    except Unavailable as error:
        if isinstance(error.__cause__, (redis.AuthenticationError, redis.InvalidResponse)):
            raise ConfigError(f"queue.url: the server refuses it: {error.__cause__}") from error
        raise


async def check_server(link: RedisLink, durability: Durability) -> None:
    """Raises ConfigError where the server does not keep the durability; warns where its streams would grow under deletes from the middle,
    and where a managed server hides its settings."""
    log = structlog.get_logger()
    try:
        settings = await link.run(link.client.config_get, "appendonly", "appendfsync", "stream-node-max-entries")
    except redis.ResponseError as error:
        log.warning("queue_server_settings_hidden", error=str(error), durability=durability.value)
        return
    found = {_text(name): _text(value) for name, value in settings.items()}
    allowed = _APPENDFSYNC_ALLOWED[durability]
    if found.get("appendonly") != "yes" or found.get("appendfsync") not in allowed:
        raise ConfigError(
            f"queue.durability {durability.value!r} needs a server with appendonly yes and appendfsync {' or '.join(allowed)}; "
            f"it has appendonly {found.get('appendonly')} and appendfsync {found.get('appendfsync')}"
        )
    if found.get("stream-node-max-entries") != "1":
        log.warning("queue_server_streams_not_compact", setting="stream-node-max-entries", wanted="1")


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value
