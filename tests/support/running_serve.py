"""A running `qlm serve` for tests: its own state folder, free ports, real processes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from qlm_core.vocabulary.errors import ConfigError
from qlm_process.cluster.state import ClusterState, ClusterStateFile

PATIENCE_S = 60.0


class Served:
    """A running `qlm serve`."""

    def __init__(self, process: subprocess.Popen[str], state_dir: Path) -> None:
        self.process = process
        self._file = ClusterStateFile(state_dir)
        self.state_dir = state_dir

    def until(self, what: str, condition: Callable[[ClusterState], bool]) -> ClusterState:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            assert self.process.poll() is None, (self.state_dir / "serve.log").read_text()
            try:
                state = self._file.read()
            except ConfigError:
                state = None
            if state is not None and state.ready and condition(state):
                return state
            time.sleep(0.05)
        raise AssertionError(f"never: {what}\n{(self.state_dir / 'serve.log').read_text()}")

    def ready(self) -> ClusterState:
        return self.until("ready", lambda _: True)

    def call(self, path: str, body: dict[str, object] | None = None) -> dict[str, Any]:
        url = f"{self.ready().of('gateway')[0].http}{path}"
        data = None if body is None else json.dumps(body).encode()
        with urllib.request.urlopen(urllib.request.Request(url, data, {"content-type": "application/json"}), timeout=PATIENCE_S) as answer:
            found = json.load(answer)
        assert isinstance(found, dict)
        return found

    def chat(self, model: str, content: str, **fields: object) -> str:
        """The answer to one message."""
        messages = [{"role": "user", "content": content}]
        answer = self.call("/v1/chat/completions", {"model": model, "messages": messages, "max_tokens": 100, **fields})
        text = answer["choices"][0]["message"]["content"]
        assert isinstance(text, str), answer
        return text


@contextmanager
def serve(state_dir: Path, *arguments: str, api_key: str = "") -> Iterator[Served]:
    """Ends by SIGTERM, with exit code 0."""
    state_dir.mkdir()
    command = [sys.executable, "-m", "qlm_cli", "serve", "--state-dir", str(state_dir), "--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"]
    with (state_dir / "serve.log").open("w") as log:
        process = subprocess.Popen(
            [*command, *arguments], stdout=log, stderr=subprocess.STDOUT, text=True, env={**os.environ, "QLM_ENGINE_API_KEY": api_key}
        )
    try:
        yield Served(process, state_dir)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0, (state_dir / "serve.log").read_text()
    finally:
        if process.poll() is None:
            process.kill()
            process.wait()
