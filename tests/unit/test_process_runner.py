"""The life of a process: its exit codes and its signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest

from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_process.cluster.state import ClusterState, ClusterStateFile, ProcessState
from qlm_process.runner import run_service
from qlm_process.temporary_folder import TemporaryFolder

DEADLINE_S = 20.0

STUBBORN = """
import asyncio, sys
from qlm_process.logs import configure_logging
from qlm_process.settings import TelemetrySettings
from qlm_process.runner import run_service
async def main(stop):
    print("up", flush=True)
    await stop.wait()
    print("stopping", flush=True)
    await asyncio.Event().wait()
configure_logging(TelemetrySettings(), "stubborn", "0")
sys.exit(run_service(main))
"""


async def returns(stop: asyncio.Event) -> None:
    assert not stop.is_set()


async def wrong_setting(stop: asyncio.Event) -> None:
    raise ConfigError("queue.url: needed")


async def fails(stop: asyncio.Event) -> None:
    raise Unavailable("away")


async def wrong_setting_in_a_task(stop: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(wrong_setting(stop))


async def fails_in_a_task(stop: asyncio.Event) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(wrong_setting(stop))
        group.create_task(fails(stop))


@pytest.mark.parametrize(
    ("main", "code"), [(returns, 0), (fails, 1), (wrong_setting, 2), (wrong_setting_in_a_task, 2), (fails_in_a_task, 1)]
)
def test_exit_codes(main: object, code: int) -> None:
    assert run_service(main) == code  # type: ignore[arg-type]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_sets_the_stop_event(number: signal.Signals) -> None:
    async def main(stop: asyncio.Event) -> None:
        os.kill(os.getpid(), number)
        async with asyncio.timeout(DEADLINE_S):
            await stop.wait()

    assert run_service(main) == 0


def test_a_second_signal_ends_a_process_that_does_not_stop() -> None:
    with subprocess.Popen([sys.executable, "-c", STUBBORN], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "up\n"
            child.send_signal(signal.SIGINT)
            assert child.stdout.readline() == "stopping\n"
            child.send_signal(signal.SIGTERM)
            assert child.wait(DEADLINE_S) == 1
        finally:
            child.kill()


# Temporary folders of child processes: removed by their owner, else by the next of their kind -------------------------


OWNER = """
from qlm_process.temporary_folder import TemporaryFolder
folder = TemporaryFolder("kind")
(folder.path / "left").write_text("x")
print(folder.path, flush=True)
input()
"""


@pytest.fixture(autouse=True)
def system_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_an_owner_removes_its_folder_and_what_is_in_it(system_folder: Path) -> None:
    folder = TemporaryFolder("kind")
    assert folder.path.parent == system_folder
    assert folder.path.stat().st_mode & 0o777 == 0o700
    assert folder.environment == {"TMPDIR": str(folder.path)}
    (folder.path / "deep").mkdir()
    (folder.path / "deep" / "file").write_text("x")
    folder.remove()
    folder.remove()
    assert not list(system_folder.iterdir())


def test_the_next_of_a_kind_removes_the_folder_of_a_killed_owner_and_no_other(system_folder: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER], env={**os.environ, "TMPDIR": str(system_folder)}, stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdin is not None
    left = Path(owner.stdout.readline().decode().strip())
    other = system_folder / f"qlm-{os.getuid()}-other-1"
    other.mkdir()
    first = TemporaryFolder("kind")
    assert (left / "left").exists(), "its owner lives"
    owner.send_signal(signal.SIGKILL)
    owner.wait()
    owner.stdin.close()
    owner.stdout.close()
    second = TemporaryFolder("kind")
    assert not left.exists()
    assert first.path.exists()
    assert other.exists()
    first.remove()
    second.remove()


def test_a_full_disk_leaves_the_systems_folder(system_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(**_: object) -> str:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tempfile, "mkdtemp", full)
    folder = TemporaryFolder("kind")
    assert folder.path == system_folder
    folder.remove()
    assert system_folder.exists()


# The state file of `qlm up` -------------------------------------------------------------------------------------------


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


def test_a_written_state_is_read_and_removed(tmp_path: Path) -> None:
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
    assert (process.pid, process.serving) == (0, False)
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
