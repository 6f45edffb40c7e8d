"""The state file of `qlm up`."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from qlm_core.errors import ConfigError
from qlm_process.cluster.state import ClusterState, ClusterStateFile, ProcessState

STATE = ClusterState(
    pid=os.getpid(),
    queue="default",
    queue_url="redis://127.0.0.1:1/0",
    ready=True,
    processes=(
        ProcessState(name="server", service="server", pid=os.getpid(), serving=True),
        ProcessState(name="gateway-0", service="gateway", pid=os.getpid(), address="127.0.0.1:2", metrics_port=3, serving=True, log="l"),
        ProcessState(name="agent-0", service="agent"),
    ),
)


def dead_pid() -> int:
    with subprocess.Popen([sys.executable, "-c", ""]) as child:
        child.wait()
    return child.pid


def test_what_is_written_is_read_and_removed(tmp_path: Path) -> None:
    file = ClusterStateFile(tmp_path)
    file.write(STATE)
    assert file.read() == STATE
    assert [process.name for process in STATE.of("gateway")] == ["gateway-0"]
    assert list(tmp_path.iterdir()) == [file.path]
    file.remove()
    file.remove()
    with pytest.raises(ConfigError, match="is `qlm up` running"):
        file.read()


def test_a_dead_process_has_no_pid_and_its_cluster_is_not_ready(tmp_path: Path) -> None:
    file = ClusterStateFile(tmp_path)
    file.write(replace(STATE, processes=(STATE.processes[0], replace(STATE.processes[1], pid=dead_pid()))))
    state = file.read()
    process = state.processes[1]
    assert (process.pid, process.serving, process.running) == (0, False, False)
    assert not state.ready


def test_a_file_that_was_left_or_is_of_another_version_is_refused(tmp_path: Path) -> None:
    file = ClusterStateFile(tmp_path)
    file.write(replace(STATE, pid=dead_pid()))
    with pytest.raises(ConfigError, match="that is gone"):
        file.read()
    file.path.write_text('{"pid": 1}')
    with pytest.raises(ConfigError, match="not a state file"):
        file.read()


def test_only_the_owner_may_read_it(tmp_path: Path) -> None:
    file = ClusterStateFile(tmp_path)
    (tmp_path / "up.tmp").write_text("left by a crash")
    file.write(STATE)
    assert file.path.stat().st_mode & 0o777 == 0o600
