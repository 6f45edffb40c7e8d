"""Advice from a process of its own is the same advice, and a process that fails or is not waited for leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import sys
from typing import cast

import pytest

from qlm_planner.advice import apart
from qlm_planner.advice.advising import advise
from qlm_planner.advice.apart import AdviceGoneError, advise_apart
from qlm_planner.advice.question import Question

from .test_advice import asked, cluster


async def test_it_is_the_same_advice() -> None:
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    assert await advise_apart(question) == advise(question)


async def test_a_process_that_fails_is_said() -> None:
    with pytest.raises(AdviceGoneError, match="ended with 1"):
        await advise_apart(cast(Question, "no question"))


@pytest.mark.skipif(sys.platform != "linux", reason="the idle class is Linux's")
async def test_it_runs_behind_all_others(monkeypatch: pytest.MonkeyPatch) -> None:
    classes: list[int] = []
    communicate = asyncio.subprocess.Process.communicate

    async def looked_at(process: asyncio.subprocess.Process, body: bytes) -> tuple[bytes, bytes]:
        classes.append(os.sched_getscheduler(process.pid))
        return await communicate(process, body)

    monkeypatch.setattr(asyncio.subprocess.Process, "communicate", looked_at)
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    assert await advise_apart(question) == advise(question)
    assert classes == [os.SCHED_IDLE]


async def test_one_that_takes_too_long_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(apart, "TIMEOUT_S", 0.01)
    begun: list[asyncio.subprocess.Process] = []
    start = asyncio.create_subprocess_exec

    async def started(*arguments: str, **options: int) -> asyncio.subprocess.Process:
        begun.append(await start(*arguments, **options))  # type: ignore[arg-type]
        return begun[-1]

    monkeypatch.setattr(asyncio, "create_subprocess_exec", started)
    question = await asked(await cluster("a"), {("alpha", 30.0): 150.0})
    with pytest.raises(AdviceGoneError, match="within"):
        await advise_apart(question)
    assert begun[0].returncode is not None
