"""The keys of a running process: read again when their file changes."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import structlog

from qlm_core.vocabulary.errors import ConfigError, QueueFull
from qlm_process.identity.key_file import read_keys
from qlm_process.identity.keys import Key, split_key, unknown_key
from qlm_process.settings import SecuritySettings

RATE_LIMITED = "RATE_LIMITED"
"""Reason of a refusal by a bound of a key."""
FULL_RETRY_AFTER_S = 0.5
POLL_S = 1.0
"""A revoked key ends within this time and that of reading the file."""

Signature = tuple[int, int, int]


class KeyRing:
    """Raises ConfigError for a file that cannot be read at the start. One that cannot be read later leaves the keys as they are, and is
    logged."""

    def __init__(self, path: str, poll_s: float = POLL_S) -> None:
        self._path = path
        self._poll_s = poll_s
        self._scopes: dict[str, set[asyncio.Timeout]] = {}
        self._signature, self._keys = _read(path)

    def find(self, text: str) -> Key:
        """The row of a key. Raises Unauthenticated."""
        identifier, secret = split_key(text)
        key = self._keys.get(identifier)
        if key is None or not key.matches(secret):
            raise unknown_key()
        return key

    @asynccontextmanager
    async def held(self, key: Key) -> AsyncIterator[None]:
        """A call under a key. Raises Unauthenticated, within it too, once the key is revoked; QueueFull where it has too many."""
        if key.id not in self._keys:
            raise unknown_key()
        if key.streams_max is not None and len(self._scopes.get(key.id, ())) >= key.streams_max:
            details = {"bound": "streams_max", "limit": str(key.streams_max), "retry_after_s": f"{FULL_RETRY_AFTER_S:g}"}
            raise QueueFull(f"this API key has streams_max of {key.streams_max} at each gateway", reason=RATE_LIMITED, details=details)
        scopes = self._scopes.setdefault(key.id, set())
        scope = asyncio.timeout(None)
        try:
            async with scope:
                scopes.add(scope)
                yield
        except TimeoutError:
            if scope.expired():
                raise unknown_key() from None
            raise
        finally:
            scopes.discard(scope)
            if not scopes and self._scopes.get(key.id) is scopes:
                del self._scopes[key.id]

    async def run(self) -> None:
        """Follows the file until it is cancelled."""
        wrong = False
        while True:
            await asyncio.sleep(self._poll_s)
            try:
                changed = await asyncio.to_thread(_signature, self._path) != self._signature
                if changed:
                    self._signature, keys = await asyncio.to_thread(_read, self._path)
                    self._replace(keys)
                wrong = False
            except (OSError, ConfigError) as error:
                if not wrong:
                    structlog.get_logger().error("key_file_wrong", error=str(error))
                wrong = True

    def _replace(self, keys: Mapping[str, Key]) -> None:
        revoked = self._keys.keys() - keys.keys()
        self._keys = keys
        now_s = asyncio.get_running_loop().time()
        for identifier in revoked:
            for scope in self._scopes.pop(identifier, ()):
                scope.reschedule(now_s)
        structlog.get_logger().info("keys_read", keys=len(keys), revoked=len(revoked))


def open_key_ring(security: SecuritySettings) -> KeyRing | None:
    """None without a key file. Raises ConfigError."""
    return KeyRing(security.key_file) if security.key_file else None


def _read(path: str) -> tuple[Signature, Mapping[str, Key]]:
    """With the file's signature before it was read: what is written meanwhile is read the next time. Raises ConfigError."""
    try:
        signature = _signature(path)
    except OSError:
        signature = (0, 0, 0)  # reading it says why
    return signature, {key.id: key for key in read_keys(path)}


def _signature(path: str) -> Signature:
    found = os.stat(path)
    return found.st_mtime_ns, found.st_ino, found.st_size
