"""Supervision of one process, with small real processes in the place of services."""

from __future__ import annotations

import asyncio
import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from qlm_cli.up.child import Child, Phase
from qlm_cli.up.config import ProcessSpec, UpSection
from qlm_core.vocabulary.errors import ConfigError, Unavailable
from qlm_process.die_with_parent import launcher

DEADLINE_S = 30.0

READY = """
import json, signal, sys
print("text first", flush=True)
print(json.dumps({"event": "ready", "address": "127.0.0.1:7", "metrics_port": 9}), flush=True)
"""
OBEDIENT = READY + "signal.sigwait({signal.SIGTERM})\n"
OBEDIENT = "import signal\nsignal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})\n" + OBEDIENT
STUBBORN = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + READY + "while True: signal.pause()\n"
MISCONFIGURED = "import json, sys\nprint(json.dumps({'event': 'config_wrong', 'error': 'gateway.listen: bad'}))\nsys.exit(2)\n"
CRASHING = "import sys\nprint('Traceback: no luck')\nsys.exit(1)\n"


def make(script: str, tmp_path: Path, **settings: float) -> Child:
    section = UpSection.model_validate({"restart_backoff_s": 0.001, "restart_backoff_max_s": 0.002, **settings})
    spec = ProcessSpec(name="p-0", service="agent", command=(sys.executable, "-c", script))
    return Child(spec, section, tmp_path / "logs", lambda: None)


@asynccontextmanager
async def running(child: Child) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(child.run())
    try:
        async with asyncio.timeout(DEADLINE_S):
            yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


async def until(condition: Callable[[], bool]) -> None:
    while not condition():
        await asyncio.sleep(0.005)


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


async def test_a_log_on_a_full_disk_loses_lines_and_nothing_else(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "p-0.log").symlink_to("/dev/full")
    child = make(OBEDIENT, tmp_path)
    async with running(child) as task:
        await child.ready.wait()
        await child.stop(DEADLINE_S)
        await task
    assert capfd.readouterr().err == ""


async def test_a_ready_line_names_the_address_and_a_stop_ends_it(tmp_path: Path) -> None:
    child = make(OBEDIENT, tmp_path)
    assert child.state().pid == 0
    child.mark_serving()
    assert child.phase is Phase.STOPPED
    async with running(child) as task:
        await child.ready.wait()
        child.mark_serving()
        state = child.state()
        assert (state.address, state.metrics_port, state.restarts, state.serving) == ("127.0.0.1:7", 9, 0, True)
        await child.stop(DEADLINE_S)
        await child.stop(DEADLINE_S)
        await task
    assert not child.killed
    assert gone(state.pid)
    assert child.state().pid == 0
    lines = Path(state.log).read_text().splitlines()
    assert lines[0] == "text first"


async def test_a_killed_process_is_started_again(tmp_path: Path) -> None:
    child = make(OBEDIENT, tmp_path)
    async with running(child):
        await child.ready.wait()
        first = child.state().pid
        os.kill(first, signal.SIGKILL)
        await until(lambda: child.state().pid not in (0, first) and child.ready.is_set())
        assert child.state().restarts == 1
        await child.stop(DEADLINE_S)


async def test_one_that_ignores_the_signal_is_killed(tmp_path: Path) -> None:
    child = make(STUBBORN, tmp_path)
    async with running(child):
        await child.ready.wait()
        await child.stop(0.05)
        assert child.killed


async def test_a_wrong_configuration_at_the_first_start_is_reported(tmp_path: Path) -> None:
    async with running(make(MISCONFIGURED, tmp_path)) as task:
        with pytest.raises(ConfigError, match=r"p-0: gateway\.listen: bad \(see .*p-0\.log"):
            await task


async def test_restarts_are_bounded(tmp_path: Path) -> None:
    child = make(CRASHING, tmp_path, restarts_max=3)
    async with running(child) as task:
        with pytest.raises(Unavailable, match="p-0 ended 4 times within 60 s: Traceback: no luck"):
            await task
    assert child.state().restarts == 3


async def test_logs_are_bounded(tmp_path: Path) -> None:
    script = "for n in range(2000): print('x' * 50)\n" + OBEDIENT
    child = make(script, tmp_path, log_bytes_max=10_000)
    async with running(child):
        await child.ready.wait()
        files = sorted((tmp_path / "logs").iterdir())
        assert [file.name for file in files] == ["p-0.log", "p-0.log.1"]
        assert all(file.stat().st_size <= 10_000 for file in files)
        await child.stop(DEADLINE_S)


async def test_a_cancelled_supervisor_leaves_no_process(tmp_path: Path) -> None:
    child = make(STUBBORN, tmp_path)
    async with running(child):
        await child.ready.wait()
        pid = child.state().pid
    assert gone(pid)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_a_killed_supervisor_takes_its_processes_along() -> None:
    command = [*launcher()[:-1]]
    script = f"""
import os, subprocess, sys, time
script = "import time; print('running', flush=True); time.sleep(600)"
child = subprocess.Popen([*{command!r}, str(os.getpid()), sys.executable, "-c", script])
print(child.pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as supervisor:
        assert supervisor.stdout is not None
        pid = int(supervisor.stdout.readline())
        try:
            descriptor = os.pidfd_open(pid)
            assert supervisor.stdout.readline() == "running\n"
            supervisor.kill()
            supervisor.wait(DEADLINE_S)

            assert select.select([descriptor], [], [], DEADLINE_S)[0], "the child outlived its supervisor"
            os.close(descriptor)
        finally:
            supervisor.kill()
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


async def test_one_whose_output_stays_open_is_started_again(tmp_path: Path) -> None:
    """Its children may hold its output for long; meanwhile it is not reported as serving."""
    heir = "import subprocess, time\nprint(subprocess.Popen(['sleep', '60']).pid, flush=True)\n"
    child = make(heir + READY + "time.sleep(60)\n", tmp_path)
    async with running(child):
        await child.ready.wait()
        child.mark_serving()
        first = child.state()
        assert first.serving
        os.kill(first.pid, signal.SIGKILL)
        await until(lambda: child.state().pid == 0)
        assert not child.state().serving
        await until(lambda: child.state().pid != 0 and child.ready.is_set())
        assert child.state().restarts == 1
        heirs = [int(line) for line in Path(first.log).read_text().split("\n") if line.isdigit()]
        assert not gone(heirs[0])
        await child.stop(DEADLINE_S)
    for pid in heirs:
        os.kill(pid, signal.SIGKILL)
