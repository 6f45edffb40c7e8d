"""Advice from a process of its own is the same advice, and a process that fails or is not waited for leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from typing import cast

import pytest

from qlm_planner.advice import apart
from qlm_planner.advice.advising import advise
from qlm_planner.advice.apart import AdviceGoneError, advise_apart
from qlm_planner.advice.question import Question

from .test_advice import asked, cluster

linux = pytest.mark.skipif(sys.platform != "linux", reason="the idle class is Linux's")


async def test_it_is_the_same_advice() -> None:
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    assert (await advise_apart(question)).advice == advise(question)


async def test_it_tells_how_long_it_had_a_core() -> None:
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    spent_s = [os.times().children_user + os.times().children_system]
    worked = await advise_apart(question)
    spent_s.append(os.times().children_user + os.times().children_system)
    assert 0.0 < worked.core_s <= spent_s[1] - spent_s[0] + 0.1


async def test_a_process_that_fails_is_said() -> None:
    with pytest.raises(AdviceGoneError, match="ended with 1"):
        await advise_apart(cast(Question, "no question"))


@pytest.fixture
def begun(monkeypatch: pytest.MonkeyPatch) -> list[asyncio.subprocess.Process]:
    """The processes that were started, in their order."""
    processes: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def started(*arguments: str, **options: int) -> asyncio.subprocess.Process:
        processes.append(await start(*arguments, **options))  # type: ignore[arg-type]
        return processes[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    return processes


@pytest.fixture
def classes(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Of scheduling, of each process as it is asked."""
    found: list[int] = []
    communicate = asyncio.subprocess.Process.communicate

    async def looked_at(process: asyncio.subprocess.Process, body: bytes) -> tuple[bytes, bytes]:
        found.append(os.sched_getscheduler(process.pid))
        return await communicate(process, body)

    monkeypatch.setattr(asyncio.subprocess.Process, "communicate", looked_at)
    return found


@linux
async def test_it_runs_behind_all_others(classes: list[int]) -> None:
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    assert (await advise_apart(question)).advice == advise(question)
    assert classes[0] == os.SCHED_IDLE


@linux
async def test_one_that_gets_no_core_is_replaced_by_a_nice_one(
    monkeypatch: pytest.MonkeyPatch, begun: list[asyncio.subprocess.Process], classes: list[int]
) -> None:
    """As where all cores are busy: advice is needed most there."""
    monkeypatch.setattr(apart, "LOOK_S", 0.2)
    had_s = 40.0  # of a core, until the first look
    monkeypatch.setattr(apart, "_core_s", lambda pid: had_s)
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    talk = asyncio.create_task(advise_apart(question))
    while not classes:
        await asyncio.sleep(0.001)
    begun[0].send_signal(signal.SIGSTOP)
    worked = await talk
    assert worked.advice == advise(question)
    assert worked.core_s > had_s, "both count"
    assert classes == [os.SCHED_IDLE, os.SCHED_OTHER]
    assert [process.returncode for process in begun] == [-signal.SIGKILL, 0]


async def test_one_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch, begun: list[asyncio.subprocess.Process]) -> None:
    monkeypatch.setattr(apart, "TIMEOUT_S", 0.01)
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    with pytest.raises(AdviceGoneError, match="within"):
        await advise_apart(question)
    assert [process.returncode for process in begun] in ([], [-signal.SIGKILL])
