"""vLLM's own API server on this CPU, with a tiny random model, as processes of their own."""

from __future__ import annotations

import atexit
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from functools import cache

from qlm_process.temporary_folder import TemporaryFolder
from tiny_models import tiny_model

MODEL = "tiny"
CONTEXT_TOKENS = 2048
KV_TOKENS = 65_536
START_S = 240.0
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_SERVER_DEV_MODE": "1",
}


class RunningVllmServer:
    """`url` is without /v1. `kill` ends all of its processes at once."""

    def __init__(self) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self._folder = TemporaryFolder("vllm-server")
        self._log = self._folder.path / "server.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> RunningVllmServer:
        """Returns when it answers. Takes 15-30 s and more on busy cores."""
        arguments = {
            "model": str(tiny_model(1, CONTEXT_TOKENS)),
            "served-model-name": MODEL,
            "host": "127.0.0.1",
            "port": str(self.port),
            "dtype": "float32",
            "max-model-len": str(CONTEXT_TOKENS),
            "kv-cache-memory-bytes": str(KV_TOKENS * 2048),  # 4 layers, 2 heads of 32, keys and values in float32
            "block-size": "32",
            "max-num-seqs": "64",
        }
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--enforce-eager"]
        command += [part for name, value in arguments.items() for part in (f"--{name}", value)]
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, env={**os.environ, **ENVIRONMENT, **self._folder.environment}, start_new_session=True
            )
        deadline_s = time.monotonic() + START_S
        while not self._answers():
            if self._process.poll() is not None or time.monotonic() > deadline_s:
                self.kill()
                raise RuntimeError(f"vLLM's server did not start:\n{self._log.read_text(errors='replace')[-4000:]}")
            time.sleep(0.25)
        return self

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()

    def close(self) -> None:
        """Ends it, and forgets what it said."""
        self.kill()
        self._folder.remove()

    def _answers(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.url}/health", timeout=5) as answer:
                return bool(answer.status == 200)
        except (urllib.error.URLError, OSError):
            return False


@cache
def shared_vllm_server() -> RunningVllmServer:
    """One for all tests of this process: whoever ends it starts it again."""
    server = RunningVllmServer()
    atexit.register(server.close)
    return server.start()
