"""The life of a process: its exit codes and its signals."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest

from qlm_core.errors import ConfigError, Unavailable
from qlm_process.runner import run_service

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
