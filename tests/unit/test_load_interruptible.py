"""A program ended by SIGTERM cleans up, on any event loop."""

from __future__ import annotations

import signal
import subprocess
import sys

import pytest

from qlm_load.interruptible import EXIT_TERMINATED, run_interruptible

PATIENCE_S = 30.0
PROGRAM = """
import asyncio, sys, uvloop
from qlm_load.interruptible import run_interruptible

async def work():
    try:
        print("works", flush=True)
        await asyncio.sleep(600)
    finally:
        await asyncio.sleep(0)
        print("cleaned up", flush=True)

run_interruptible(work(), {"own": None, "uvloop": uvloop.new_event_loop}[sys.argv[1]])
"""


@pytest.mark.parametrize("loop", ["own", "uvloop"])
def test_sigterm_ends_it_through_its_own_finally(loop: str) -> None:
    with subprocess.Popen([sys.executable, "-c", PROGRAM, loop], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            assert process.stdout.readline() == "works\n"
            process.send_signal(signal.SIGTERM)
            assert process.communicate(timeout=PATIENCE_S)[0] == "cleaned up\n"
        finally:
            process.kill()
    assert process.returncode == EXIT_TERMINATED


def test_its_result_and_its_error_come_through() -> None:
    async def works() -> int:
        return 7

    async def fails() -> None:
        raise ValueError("no")

    assert run_interruptible(works()) == 7
    with pytest.raises(ValueError, match="no"):
        run_interruptible(fails())
