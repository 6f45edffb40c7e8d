"""A server whose settings and end a test decides, and requests that fill it."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import subprocess
import time
from hashlib import blake2b
from pathlib import Path

import pytest

from qlm.api.v1.request_pb2 import Request
from qlm_core.vocabulary.errors import QueueFull, Unavailable
from qlm_core.vocabulary.request import RequestKey
from qlm_queue.redis.queue import RedisQueue
from qlm_queue.values import Acceptance

START_S = 10.0
MEBIBYTE = 1 << 20
BODY_BYTES = 20_000


def need_redis_server() -> None:
    """Skips the test where there is none; in CI it fails."""
    if shutil.which("redis-server") is None:
        assert not os.environ.get("CI"), "no redis-server on PATH; CI needs it"
        pytest.skip("no redis-server on PATH")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Server:
    """A redis-server of one's own, which may be started anew with other settings."""

    def __init__(self, folder: Path, launcher: tuple[str, ...] = ()) -> None:
        self._folder = folder
        self._launcher = launcher
        self.port = free_port()
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self, *settings: str) -> None:
        always = ["--port", str(self.port), "--dir", str(self._folder), "--save", "", "--appendonly", "yes", "--appendfsync", "no"]
        self.start_with(*always, *settings)

    def start_with(self, *arguments: str) -> None:
        """With these alone."""
        self._process = subprocess.Popen(
            [*self._launcher, "redis-server", *arguments], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        deadline_s = time.monotonic() + START_S
        while time.monotonic() < deadline_s:
            with socket.socket() as client:
                if client.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise AssertionError("the server does not answer")

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        if self._process is not None:
            self._process.send_signal(number)
            self._process.wait(START_S)
            self._process = None


def acceptance(number: int, size: int = BODY_BYTES) -> Acceptance:
    body = Request(model="m", text="x" * size).SerializeToString()
    digest = blake2b(body, digest_size=16).digest()
    return Acceptance(key=RequestKey("t0", f"r{number}"), body=body, digest=digest, gateway="", slo_class="8s", prompt_tokens=9)


async def accepted_at_last(queue: RedisQueue, number: int) -> None:
    """Within some seconds."""
    deadline_s = time.monotonic() + 5.0
    while True:
        try:
            await queue.accept(acceptance(number))
        except (QueueFull, Unavailable):
            assert time.monotonic() < deadline_s, await queue.refusal()
            await asyncio.sleep(0.05)
        else:
            return


async def filled(queue: RedisQueue, size: int = BODY_BYTES) -> tuple[int, QueueFull]:
    """Accepts until it is refused, with pauses as long as a reading of the server is kept."""
    for number in range(1_000):
        try:
            await queue.accept(acceptance(number, size))
        except QueueFull as error:
            return number, error
        if (number + 1) * size % (20 * BODY_BYTES) == 0:
            await asyncio.sleep(0.5)
    raise AssertionError("it is never full")
