"""The demo's own cluster: `qlm up` as a child process, and its state file."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import sys
from collections.abc import Mapping
from pathlib import Path

from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_process.cluster.state import ClusterState, ClusterStateFile

POLL_S = 0.1
STOP_TIMEOUT_S = 40.0


class Cluster:
    """Starts `qlm up` in a fresh state folder. `stop` is safe unstarted and twice."""

    def __init__(
        self, folder: Path, config_path: str, overrides: Mapping[str, object], environment: Mapping[str, str] | None = None
    ) -> None:
        """`folder` takes the log `up.log` and the state folder `state`, which is made anew. `environment`: additional variables."""
        self.log_path = folder / "up.log"
        self._state_dir = folder / "state"
        self._arguments = ["up", "--config", config_path, "--state-dir", str(self._state_dir)]
        for key, value in overrides.items():
            self._arguments += ["--set", f"{key}={value}"]
        self._environment = environment or {}
        self._file = ClusterStateFile(self._state_dir)
        self._process: asyncio.subprocess.Process | None = None

    async def start(self, timeout_s: float) -> ClusterState:
        """Returns when all its processes serve. Raises Unavailable with the end of its log if they do not in time."""
        shutil.rmtree(self._state_dir, ignore_errors=True)
        self._state_dir.mkdir(parents=True)
        with self.log_path.open("wb") as log:
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                *("-m", "qlm_cli", *self._arguments),
                env={**os.environ, **self._environment},
                stdin=asyncio.subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,  # Ctrl-C must reach the demo alone, which stops the cluster in order
            )
        try:
            async with asyncio.timeout(timeout_s):
                while (state := self.state()) is None or not state.ready:
                    if self._process.returncode is not None:
                        raise Unavailable(f"`qlm up` ended at its start:\n{self._log_end()}")
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise Unavailable(f"the cluster did not serve within {timeout_s:g} s:\n{self._log_end()}") from None
        return state

    def state(self) -> ClusterState | None:
        """Its present processes, dead ones with pid 0; None without a state file or `qlm up`."""
        try:
            return self._file.read()
        except ConfigError:
            return None

    async def stop(self) -> bool:
        """Drains and stops; True if it ended by itself and without an error."""
        process = self._process
        if process is None or process.returncode is not None:
            return process is None or process.returncode == 0
        process.send_signal(signal.SIGINT)
        try:
            async with asyncio.timeout(STOP_TIMEOUT_S):
                return await process.wait() == 0
        except TimeoutError:
            process.kill()
            await process.wait()
            return False

    def _log_end(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")[-2_000:]


def serving_pids(state: ClusterState | None) -> dict[str, int]:
    """Processes that live and serve, by name."""
    return {} if state is None else {process.name: process.pid for process in state.processes if process.pid and process.serving}


def living_pids(state: ClusterState | None) -> dict[str, int]:
    """Processes that live, also those that do not serve (yet), by name."""
    return {} if state is None else {process.name: process.pid for process in state.processes if process.pid}
