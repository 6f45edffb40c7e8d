"""The end of engine processes, as the agent waits for it: with any processes."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess

import pytest

from qlm_agent.vllm import template
from qlm_agent.vllm.template import Template

GROUP = "sleep 60 & echo begun; wait"


@pytest.fixture
def group() -> subprocess.Popen[bytes]:
    """A process that leads a group of two."""
    process = subprocess.Popen(["sh", "-c", GROUP], stdout=subprocess.PIPE, start_new_session=True)
    assert process.stdout is not None
    with process.stdout as said:
        said.readline()
    return process


async def test_an_ended_process_is_gone_when_its_whole_group_is(group: subprocess.Popen[bytes]) -> None:
    waiting = asyncio.create_task(Template("", {}, 1.0).gone(group.pid))
    await asyncio.sleep(0)
    assert not waiting.done()
    group.kill()
    group.wait()
    done, _ = await asyncio.wait([waiting], timeout=5 * template.GONE_POLL_S)
    assert not done, "a process of its group lives"
    os.killpg(group.pid, signal.SIGKILL)
    async with asyncio.timeout(10.0):
        await waiting


async def test_one_that_never_goes_is_not_waited_for_without_end(group: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template, "GONE_MAX_S", 0.05)
    await Template("", {}, 1.0).gone(group.pid)
    os.killpg(group.pid, signal.SIGKILL)
    group.wait()


async def test_one_that_never_began_is_gone() -> None:
    await Template("", {}, 1.0).gone(0)
