"""The same engine with tensor parallelism: vLLM computes in processes of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from qlm_agent.engines.port import EngineRequest, FailureKind, FinishReason, ModelLoadFailed, Sampling, Tier, TokenPrompt
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.settings import VllmSettings
from running_cluster import gone, wait_until
from vllm_nursery import QuickTemplate

DEADLINE_S = 300.0
GREEDY = Sampling(temperature=0.0, ignore_eos=True)
WORKERS = 2


def members(group: int) -> list[int]:
    """The processes of a group."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        if int(fields[2]) == group:
            found.append(int(folder.name))
    return found


def worker_of(group: int) -> int:
    """A process of vLLM's own that computes."""
    return max(pid for pid in members(group) if b"Worker" in Path(f"/proc/{pid}/cmdline").read_bytes())


class Reading:
    """Adds runs of one prompt to an engine, and reads their output."""

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self.tokens: dict[str, bytes] = {}
        self.ended: dict[str, FinishReason | FailureKind] = {}

    @property
    def group(self) -> int:
        """The engine's process, which leads those of vLLM."""
        child = self.engine._placement.child("a")
        assert child is not None
        return child.pid

    async def add(self, run_id: str, tokens: int, produced: bytes = b"") -> None:
        prompt = TokenPrompt(ids=[3, 4, 5])
        await self.engine.add(
            EngineRequest(
                run_id=run_id, model="a", prompt=prompt, prompt_tokens=3, output_tokens_max=tokens, sampling=GREEDY, produced=produced
            )
        )

    async def until(self, run_id: str, count: int | None = None) -> None:
        """Until the run has so many tokens, or has ended."""
        while run_id not in self.ended and (count is None or len(self.tokens.get(run_id, b"")) < 4 * count):
            for output in await self.engine.outputs():
                self.tokens[output.run_id] = self.tokens.get(output.run_id, b"") + output.token_ids
                end = output.finish if output.failure is None else output.failure.kind
                if end is not None:
                    self.ended[output.run_id] = end


def engine_of(weights: Path) -> VllmEngine:
    settings = VllmSettings(kv_cache_gb=0.1, arguments={"tensor_parallel_size": WORKERS, "async_scheduling": True})
    models = {"a": VllmModel(name="a", weights=str(weights), context_tokens_max=2048)}
    return VllmEngine(models, settings, batch_max=8, template=QuickTemplate(like_gpus=True))


@pytest.fixture
async def reading(tiny_models: tuple[Path, Path]) -> AsyncIterator[Reading]:
    engine = engine_of(tiny_models[0])
    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            await engine.load_model("a", Tier.ACTIVE)
            yield Reading(engine)
    finally:
        await engine.stop()


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.timeout(DEADLINE_S + 60)
async def test_an_engine_whose_worker_dies_is_started_again(reading: Reading, busy: bool) -> None:
    first = reading.group
    if busy:
        await reading.add("lost", 2000)
        await reading.until("lost", 1)
    os.kill(worker_of(first), signal.SIGKILL)
    if busy:
        await reading.until("lost")
        assert reading.ended["lost"] is FailureKind.BROKEN
    while (child := reading.engine._placement.child("a")) is None or child.pid == first:
        await asyncio.sleep(0.05)
    await reading.add("again", 20)
    await reading.until("again")
    assert reading.ended["again"] is FinishReason.LENGTH


@pytest.mark.timeout(DEADLINE_S + 60)
async def test_it_serves_aborts_resumes_and_leaves_nothing_behind(reading: Reading) -> None:
    await reading.add("whole", 200)
    await reading.until("whole")
    await reading.add("evicted", 200)
    await reading.until("evicted", 20)
    await reading.engine.abort(["evicted"])
    seen = reading.tokens["evicted"]
    await reading.add("resumed", 200, seen)
    await reading.until("resumed")
    assert seen + reading.tokens["resumed"] == reading.tokens["whole"]
    stats = reading.engine.stats()
    assert (stats.running, stats.waiting, stats.batch_max) == (0, 0, 8)
    group = members(reading.group)
    assert len(group) > WORKERS
    os.kill(reading.group, signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: all(gone(pid) for pid in group), 60.0, "vLLM's processes end with theirs")


async def test_a_failed_load_says_what_failed_in_vllms_own_processes(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_models[0], damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    engine = engine_of(damaged)
    try:
        await engine.start()
        for _ in range(2):
            with pytest.raises(ModelLoadFailed, match=r"model a could not be loaded: .*SafetensorError: Error while deserializing header"):
                await engine.load_model("a", Tier.ACTIVE)
    finally:
        await engine.stop()
