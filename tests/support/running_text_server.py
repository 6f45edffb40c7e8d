"""Starts and ends `text_server` processes."""

from __future__ import annotations

import atexit
import subprocess
import sys
from functools import cache
from pathlib import Path

import text_server


class RunningTextServer:
    """A process of its own. `start` again on the same port after `kill`."""

    def __init__(self, *options: str) -> None:
        self.port = 0
        self._options = options
        self._process: subprocess.Popen[str] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def pid(self) -> int:
        assert self._process is not None
        return self._process.pid

    def start(self) -> RunningTextServer:
        assert self._process is None
        command = [sys.executable, str(Path(text_server.__file__)), "--port", str(self.port), *self._options]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self._process.stdout is not None
        self.port = int(self._process.stdout.readline())
        return self

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.communicate()


@cache
def shared_text_server() -> RunningTextServer:
    """One for all tests of this process that leave it as it is."""
    server = RunningTextServer().start()
    atexit.register(server.kill)
    return server
