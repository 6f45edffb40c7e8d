"""The same engine with tensor parallelism: vLLM computes in processes of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from engine_reader import EngineReader
from qlm_agent.engines.port import FailureKind, FinishReason, ModelLoadFailed, Tier
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.settings import VllmSettings
from running_cluster import gone, wait_until
from vllm_nursery import QuickTemplate

WORKERS = 2

pytestmark = pytest.mark.timeout(300)


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


def group_of(engine: VllmEngine) -> int:
    """The engine's process, which leads those of vLLM; 0 while there is none."""
    child = engine._placement.child("a")
    return 0 if child is None else child.pid


def engine_of(weights: Path) -> VllmEngine:
    settings = VllmSettings(kv_cache_gb=0.1, arguments={"tensor_parallel_size": WORKERS, "async_scheduling": True})
    models = {"a": VllmModel(name="a", weights=str(weights), context_tokens_max=2048)}
    return VllmEngine(models, settings, batch_max=8, template=QuickTemplate(like_gpus=True))


@pytest.fixture
async def engine(tiny_models: tuple[Path, Path]) -> AsyncIterator[VllmEngine]:
    engine = engine_of(tiny_models[0])
    try:
        await engine.start()
        await engine.load_model("a", Tier.ACTIVE)
        yield engine
    finally:
        await engine.stop()


@pytest.mark.parametrize("busy", [True, False])
async def test_an_engine_whose_worker_dies_is_started_again(engine: VllmEngine, busy: bool) -> None:
    reader, first = EngineReader(engine), group_of(engine)
    if busy:
        await reader.add("lost")
        await reader.until_made(1, "lost")
    os.kill(worker_of(first), signal.SIGKILL)
    if busy:
        (lost,) = await reader.ends("lost")
        assert lost.failure is not None
        assert lost.failure.kind is FailureKind.BROKEN
    while group_of(engine) in (0, first):
        await asyncio.sleep(0.05)
    assert (await reader.run("again", 20))[1].finish is FinishReason.LENGTH


async def test_it_serves_aborts_resumes_and_leaves_nothing_behind(engine: VllmEngine) -> None:
    reader = EngineReader(engine)
    whole, _ = await reader.run("whole", 80)
    await reader.add("evicted", 80)
    await reader.until_made(10, "evicted")
    await engine.abort(["evicted"])
    made = reader.tokens["evicted"]
    assert made + (await reader.run("resumed", 80, after=made))[0] == whole
    stats = engine.stats()
    assert (stats.running, stats.waiting, stats.batch_max) == (0, 0, 8)
    group = members(group_of(engine))
    assert len(group) > WORKERS
    os.kill(group_of(engine), signal.SIGKILL)
    await asyncio.to_thread(wait_until, lambda: all(gone(pid) for pid in group), 60.0, "vLLM's processes end with theirs")


async def test_a_failed_load_names_the_fault_in_vllms_own_processes(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
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
