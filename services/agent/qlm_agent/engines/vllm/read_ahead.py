"""Weights read from disk into the host's memory before anybody loads them: into the kernel's page cache, where a process that starts later
finds them. The kernel may drop them again where memory is short; then they are read from disk once more."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from pathlib import Path

CHUNK_BYTES = 8 << 20


async def read_ahead(files: Sequence[Path]) -> int:
    """Returns the bytes read; ends soon after it is cancelled. Raises OSError."""
    stop = threading.Event()
    reading = asyncio.ensure_future(asyncio.to_thread(_read, files, stop))
    try:
        return await asyncio.shield(reading)
    except asyncio.CancelledError:
        stop.set()
        await asyncio.wait([reading])
        raise


def _read(files: Sequence[Path], stop: threading.Event) -> int:
    total = 0
    buffer = bytearray(CHUNK_BYTES)
    for path in files:
        with path.open("rb", buffering=0) as file:
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_SEQUENTIAL)
            while not stop.is_set() and (count := file.readinto(buffer)):
                total += count
    return total
