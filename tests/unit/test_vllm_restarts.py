"""An engine process that has ended is started again, over engine processes that are threads (`sleeping_gpu`)."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from itertools import pairwise
from pathlib import Path
from typing import cast

import pytest

from qlm_agent.engines.port import ModelLoadFailed, Tier
from qlm_agent.engines.vllm import engine as vllm_engine
from qlm_agent.engines.vllm.engine import EngineLost, VllmEngine
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.process.child import Child
from qlm_agent.engines.vllm.process.frames import Frame
from qlm_agent.engines.vllm.process.template import Template
from qlm_agent.engines.vllm.settings import VllmSettings
from sleeping_gpu import KV_BYTES, WEIGHTS_BYTES, Gpu, ThreadTemplate, model_folder

RESTARTS_MAX = 4
PAUSE_S = 0.05
DEADLINE_S = 20.0


class TimedTemplate(ThreadTemplate):
    """Keeps when each process was started."""

    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.started_s: list[float] = []
        self.fails: list[Exception] = []

    async def fork(self, make: Callable[[Callable[[int], asyncio.Future[int]]], Child]) -> Child:
        self.started_s.append(time.monotonic())
        if self.fails:
            raise self.fails.pop()
        return await super().fork(make)

    async def stop(self) -> None:
        """They end with their sockets."""


class Rig:
    """An engine with one model, which is active."""

    def __init__(self, folder: Path, *, keep_cold: bool = True) -> None:
        self.gpu = Gpu(models=1.5, weights_bytes=WEIGHTS_BYTES, kv_bytes=KV_BYTES)
        self.template = TimedTemplate(self.gpu)
        settings = VllmSettings(device="cuda", kv_cache_gb=(KV_BYTES + 1) / 1e9, restarts_max=RESTARTS_MAX, keep_cold=keep_cold)
        models = {"a": VllmModel(name="a", weights=model_folder(folder / "a"), context_tokens_max=64)}
        self.engine = VllmEngine(models, settings, batch_max=4, template=cast(Template, self.template))

    @property
    def child(self) -> Child | None:
        return self.engine._placement.child("a")

    async def kill(self) -> None:
        """Returns when it is known to have ended."""
        child = self.child
        assert child is not None
        child.kill("killed by the test")
        async with asyncio.timeout(DEADLINE_S):
            while not child.ended:
                await asyncio.sleep(0.001)

    def pauses_s(self) -> list[float]:
        """Between the attempts to start it again."""
        return [later - earlier for earlier, later in pairwise(self.template.started_s[1:])]


@pytest.fixture
async def rig(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Rig]:
    monkeypatch.setattr(vllm_engine, "RESTART_MIN_S", PAUSE_S)
    rig = Rig(tmp_path)
    await rig.engine.load_model("a", Tier.ACTIVE)
    yield rig
    await rig.engine.stop()


async def test_pauses_between_attempts_double(rig: Rig) -> None:
    rig.gpu.load_fails = 3
    await rig.kill()
    async with asyncio.timeout(DEADLINE_S):
        while rig.child is None:
            await asyncio.sleep(0.001)
    pauses_s = rig.pauses_s()
    assert len(pauses_s) == 3
    assert all(pause_s >= PAUSE_S * 2**number for number, pause_s in enumerate(pauses_s)), pauses_s
    assert rig.engine.tier("a") is Tier.ACTIVE


async def test_after_too_many_attempts_the_engine_is_lost(rig: Rig) -> None:
    rig.gpu.load_fails = 1_000
    await rig.kill()
    with pytest.raises(EngineLost, match=rf"model a: its engine process {RESTARTS_MAX} times in a row could not be started.*out of memory"):
        async with asyncio.timeout(DEADLINE_S):
            await rig.engine.outputs()
    assert len(rig.template.started_s) == 1 + RESTARTS_MAX


async def test_one_that_starts_and_ends_again_and_again_is_lost_too_and_says_how_it_ended(rig: Rig) -> None:
    for _ in range(1 + RESTARTS_MAX):
        async with asyncio.timeout(DEADLINE_S):
            while rig.child is None:
                await asyncio.sleep(0.001)
        await rig.kill()
    with pytest.raises(EngineLost, match=r"or ended before any output; the last time: .* killed by the test"):
        async with asyncio.timeout(DEADLINE_S):
            await rig.engine.outputs()


async def test_a_host_without_resources_is_one_attempt_that_failed(rig: Rig) -> None:
    """No descriptor is left for a socket, say: it is tried again like all else, and not given up without a word."""
    rig.template.fails = [OSError(24, "Too many open files")] * 2
    await rig.kill()
    async with asyncio.timeout(DEADLINE_S):
        while rig.child is None:
            await asyncio.sleep(0.001)
    assert len(rig.template.started_s) == 4


async def test_an_unforeseen_error_of_a_restart_loses_the_engine(rig: Rig) -> None:
    rig.template.fails = [ZeroDivisionError("a bug")]
    await rig.kill()
    with pytest.raises(EngineLost, match=r"could not be started again: ZeroDivisionError\('a bug'\)"):
        async with asyncio.timeout(DEADLINE_S):
            await rig.engine.outputs()


async def test_a_load_without_resources_fails(rig: Rig) -> None:
    await rig.engine.load_model("a", Tier.COLD)
    await rig.kill()
    rig.template.fails = [OSError(24, "Too many open files")]
    with pytest.raises(ModelLoadFailed, match="Too many open files"):
        await rig.engine.load_model("a", Tier.ACTIVE)
    await rig.engine.load_model("a", Tier.ACTIVE)


async def test_the_room_for_kv_is_known_while_a_process_starts_again(rig: Rig) -> None:
    """A model that is warmed meanwhile reports it to the agent, which relies on the last report."""
    rig.gpu.load_fails = 2
    room = rig.engine.stats().kv_capacity_tokens
    await rig.kill()
    assert rig.child is None
    stats = rig.engine.stats()
    assert (stats.active_model, stats.kv_capacity_tokens, stats.kv_used_tokens) == ("a", room, 0)
    assert room > 0


async def test_processes_that_made_room_are_forgotten_and_what_they_preempted_is_not(tmp_path: Path) -> None:
    rig = Rig(tmp_path, keep_cold=False)
    for _ in range(3):
        await rig.engine.load_model("a", Tier.ACTIVE)
        child = rig.child
        assert child is not None
        child.stats = {**child.stats, "preemptions": 2}
        rig.engine._stepped(child, Frame({"t": "step", "made": []}))
        await rig.engine.load_model("a", Tier.COLD)
        assert child.ended
    assert rig.engine.stats().preemptions == 6
    assert not rig.engine._seen
    await rig.engine.stop()
