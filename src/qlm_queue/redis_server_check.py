"""What a server must be configured to, for a queue's durability to hold there."""

from __future__ import annotations

import redis.asyncio as redis
import structlog

from qlm_core.errors import ConfigError
from qlm_queue.redis_link import RedisLink
from qlm_queue.values import Durability

_APPENDFSYNC_ALLOWED = {Durability.PROCESS: ("no", "always"), Durability.DISK: ("always",)}


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
