"""A real `qlm up` for tests: its own state folder, free ports, real processes, real signals."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from click.testing import CliRunner, Result

from qlm_cli.root import root
from qlm_core.vocabulary.errors import ConfigError
from qlm_process.cluster.state import ClusterState, ClusterStateFile

START_TIMEOUT_S = 120.0
"""For a busy machine."""
STOP_TIMEOUT_S = 60.0
POLL_S = 0.05

FREE_PORT_GATEWAY = 'gateways=[{name: gateway-0, listen: "127.0.0.1:0", http: {listen: "127.0.0.1:0"}}]'


class RunningCluster:
    """Starts and ends `qlm up`; may be started again on the same state folder."""

    def __init__(self, state_dir: Path, settings: Mapping[str, str] | None = None, environment: Mapping[str, str] | None = None) -> None:
        self.state_dir = state_dir
        self._settings = dict(settings or {})
        self._environment = dict(environment or {})
        self._file = ClusterStateFile(state_dir)
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> RunningCluster:
        try:
            self.start()
        except BaseException:
            self.kill()  # or it outlives the tests
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def kill(self) -> None:
        """Kills `qlm up`, whose processes die with it. Safe twice."""
        if self._process is not None and self._process.poll() is None:
            self._process.kill()
            self._process.wait(STOP_TIMEOUT_S)

    @property
    def state(self) -> ClusterState:
        return self._file.read()

    @property
    def address(self) -> str:
        """Address of the first gateway."""
        return self.state.of("gateway")[0].address

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self.state.processes]

    def start(self, *, until_ready: bool = True) -> None:
        settings = {"up.start_timeout_s": f"{START_TIMEOUT_S:g}", **self._settings}
        overrides = [part for key, value in settings.items() for part in ("--set", f"{key}={value}")]
        command = [sys.executable, "-m", "qlm_cli", "up", "--state-dir", str(self.state_dir), "--set", FREE_PORT_GATEWAY, *overrides]
        self.state_dir.mkdir(parents=True, exist_ok=True)
        self._log_path = self.state_dir / "up.log"
        with self._log_path.open("w") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, text=True, env={**os.environ, **self._environment}, start_new_session=True
            )
        if until_ready:
            self.wait_for(lambda state: state.ready)

    def wait_for(self, condition: Callable[[ClusterState], bool], timeout_s: float = START_TIMEOUT_S) -> ClusterState:
        """The first state for which the condition holds."""
        assert self._process is not None
        deadline_s = time.monotonic() + timeout_s
        while time.monotonic() < deadline_s:
            assert self._process.poll() is None, f"`qlm up` ended:\n{self.log()}"
            try:
                state = self.state
            except ConfigError:
                state = None
            if state is not None and condition(state):
                return state
            time.sleep(POLL_S)
        raise AssertionError(f"not within {timeout_s} s:\n{self.log()}")

    def interrupt(self, number: signal.Signals = signal.SIGINT) -> int:
        """Sends a signal and returns the exit code."""
        assert self._process is not None
        self._process.send_signal(number)
        return self.wait()

    def wait(self) -> int:
        assert self._process is not None
        return self._process.wait(STOP_TIMEOUT_S)

    def send(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)

    def log(self) -> str:
        """Output of `qlm up`, and the ends of its processes' logs."""
        parts = [self._log_path.read_text()]
        parts += [f"--- {path.name}\n{path.read_text()[-3000:]}" for path in sorted((self.state_dir / "logs").glob("*.log"))]
        return "\n".join(parts)


def qlm_command(*arguments: str, text: str | None = None, width: int = 200, environment: Mapping[str, str] | None = None) -> Result:
    """A `qlm` command in this process, with plain output `width` wide. Raises AssertionError where it ends with a traceback."""
    variables = {"COLUMNS": str(width), "TERM": "dumb", **(environment or {})}
    done = CliRunner(env=variables).invoke(root, arguments, input=text)
    assert done.exception is None or isinstance(done.exception, SystemExit), (arguments, done.exc_info)
    return done


def wait_until(condition: Callable[[], bool], timeout_s: float, what: str) -> None:
    """Polls a condition with a deadline."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, f"{what}: not within {timeout_s} s"
        time.sleep(POLL_S)


def gone(pid: int) -> bool:
    """No such process, or a dead one that nobody has waited for."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
