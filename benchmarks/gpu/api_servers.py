"""vLLM's own API servers on this machine, for a check: in its process group, which ends with it (`checks.run`)."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

from qlm_core.vocabulary.errors import QlmError
from qlm_process.temporary_folder import TemporaryFolder

START_S = 600.0
STOP_S = 60.0
POLL_S = 0.25
CALL_S = 120.0
LOG_CHARACTERS = 1_000
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
}


class ServerFailed(QlmError):
    """A server did not start, or failed a call."""

    default_reason = "ENGINE_FAILURE"


class ApiServer:
    """`arguments`: of the server's command line, beside host and port. `log`: a file. `url` is without /v1."""

    def __init__(self, arguments: Sequence[str], log: Path) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{port}"
        self._log = log
        self._command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--host", "127.0.0.1", "--port", str(port), *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        self._folder: TemporaryFolder | None = None

    def start(self) -> None:
        """Returns when it answers. Raises ServerFailed with the end of its log."""
        self._folder = TemporaryFolder("vllm-server")
        environment = {**os.environ, **ENVIRONMENT, **self._folder.environment}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log, env=environment)
        deadline_s = time.monotonic() + START_S
        while not self._answers("/health"):
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.stop()
                raise ServerFailed(f"vLLM's server did not start: {self._log.read_text(errors='replace')[-LOG_CHARACTERS:]}")
            time.sleep(POLL_S)

    def post(self, path: str) -> None:
        """Raises ServerFailed."""
        if not self._answers(path, post=True):
            raise ServerFailed(f"{self.url}{path} failed")

    def stop(self) -> None:
        """Sends SIGTERM and waits for the end. Safe twice."""
        process, self._process = self._process, None
        if process is not None:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()

    def _answers(self, path: str, *, post: bool = False) -> bool:
        request = urllib.request.Request(self.url + path, method="POST" if post else "GET")
        try:
            with urllib.request.urlopen(request, timeout=CALL_S) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False
