"""The version of a queue's data: which builds may use it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import redis.asyncio as redis

from qlm_core.vocabulary.errors import ConfigError

DATA_VERSION = 1
"""Version of the keys of `keys.py` and their content. It grows with a change that builds of the version before misread; a new key that
these leave alone is none."""

Ask = Callable[..., Awaitable[Any]]
"""Makes one command; its answer is as the server gives it. ResponseError for a refusal."""


async def agree_on_version(ask: Ask, key: str, queue_name: str, own: int) -> None:
    """Writes the version of this build into a queue that has none, or a damaged one. Raises ConfigError for another version. A server that
    takes no writes now is asked again at the next connection."""
    try:
        stored: bytes | None = await ask("GET", key)
    except redis.ResponseError:  # of another type
        stored = b""
    try:
        if stored is None:
            stored = await ask("SET", key, own, "NX", "GET")  # another build may have been first
        elif not stored.isdigit():
            await ask("SET", key, own)
    except redis.ResponseError:
        return
    if stored is not None and stored.isdigit() and int(stored) != own:
        raise ConfigError(
            f"queue {queue_name!r} holds data of version {int(stored)} and this build uses version {own}: run a build of version "
            f"{int(stored)}, or give this one a queue of its own (queue.name)"
        )
