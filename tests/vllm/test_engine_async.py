"""The same engine through vLLM's AsyncLLM, which has processes of its own."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest

from qlm_agent.engines.port import EngineOutput, EngineRequest, FailureKind, FinishReason, ModelLoadFailed, Sampling, Tier, TokenPrompt
from qlm_agent.engines.vllm.engine import VllmEngine
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.settings import VllmSettings
from running_cluster import gone, wait_until
from vllm_nursery import QuickTemplate

DEADLINE_S = 300.0
GREEDY = Sampling(temperature=0.0, ignore_eos=True)


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


def core_of(group: Sequence[int]) -> int:
    """The process of vLLM's own that computes."""
    (core,) = [pid for pid in group if b"EngineCore" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    return core


@pytest.mark.parametrize("busy", [True, False])
@pytest.mark.timeout(DEADLINE_S + 60)
async def test_an_engine_whose_own_process_dies_is_started_again(tiny_models: tuple[Path, Path], busy: bool) -> None:
    models = {"a": VllmModel(name="a", weights=str(tiny_models[0]), context_tokens_max=2048)}
    engine = VllmEngine(models, VllmSettings(kv_cache_gb=0.1, runner="async"), batch_max=8, template=QuickTemplate("async"))
    ended: dict[str, EngineOutput] = {}

    async def add(run_id: str, tokens: int) -> None:
        prompt = TokenPrompt(ids=[3, 4, 5])
        await engine.add(EngineRequest(run_id=run_id, model="a", prompt=prompt, prompt_tokens=3, output_tokens_max=tokens, sampling=GREEDY))

    async def until(run_id: str, *, end: bool) -> None:
        while True:
            outputs = await engine.outputs()
            ended.update({output.run_id: output for output in outputs if output.finish is not None or output.failure is not None})
            if run_id in ended or (not end and any(output.run_id == run_id for output in outputs)):
                return

    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            await engine.load_model("a", Tier.ACTIVE)
            first = engine._placement.child("a")
            assert first is not None
            if busy:
                await add("lost", 2000)
                await until("lost", end=False)
            os.kill(core_of(members(first.pid)), signal.SIGKILL)
            if busy:
                await until("lost", end=True)
                failure = ended["lost"].failure
                assert failure is not None
                assert failure.kind is FailureKind.BROKEN
            while engine._placement.child("a") in (first, None):
                await asyncio.sleep(0.05)
            await add("again", 20)
            await until("again", end=True)
            assert ended["again"].finish is FinishReason.LENGTH
    finally:
        await engine.stop()


@pytest.mark.timeout(DEADLINE_S + 60)
async def test_it_serves_aborts_resumes_and_leaves_nothing_behind(tiny_models: tuple[Path, Path]) -> None:
    models = {"a": VllmModel(name="a", weights=str(tiny_models[0]), context_tokens_max=2048)}
    engine = VllmEngine(models, VllmSettings(kv_cache_gb=0.1, runner="async"), batch_max=8)
    tokens: dict[str, bytes] = {}

    async def add(run_id: str, produced: bytes = b"") -> None:
        prompt = TokenPrompt(ids=[3, 4, 5])
        await engine.add(
            EngineRequest(
                run_id=run_id, model="a", prompt=prompt, prompt_tokens=3, output_tokens_max=200, sampling=GREEDY, produced=produced
            )
        )

    async def until(run_id: str, count: int) -> None:
        """The run has made so many tokens, or has ended."""
        while len(tokens.get(run_id, b"")) < 4 * count:
            for output in await engine.outputs():
                assert output.failure is None, output.failure
                tokens[output.run_id] = tokens.get(output.run_id, b"") + output.token_ids
                assert output.finish in (None, FinishReason.LENGTH)

    try:
        async with asyncio.timeout(DEADLINE_S):
            await engine.start()
            await engine.load_model("a", Tier.ACTIVE)
            await add("whole")
            await until("whole", 200)
            await add("evicted")
            await until("evicted", 20)
            await engine.abort(["evicted"])
            seen = tokens["evicted"]
            await add("resumed", seen)
            await until("resumed", 200 - len(seen) // 4)
            assert seen + tokens["resumed"] == tokens["whole"]
            assert (engine.stats().running, engine.stats().waiting, engine.stats().batch_max) == (0, 0, 8)
            child = engine._placement.child("a")
            assert child is not None
            group = members(child.pid)
            assert len(group) > 2
            os.kill(child.pid, signal.SIGKILL)
            await asyncio.to_thread(wait_until, lambda: all(gone(pid) for pid in group), 60.0, "vLLM's processes end with theirs")
    finally:
        await engine.stop()


async def test_a_failed_load_says_what_failed_in_vllms_own_processes(tiny_models: tuple[Path, Path], tmp_path: Path) -> None:
    damaged = tmp_path / "damaged"
    shutil.copytree(tiny_models[0], damaged)
    weights = damaged / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:100_000])
    models = {"a": VllmModel(name="a", weights=str(damaged), context_tokens_max=2048)}
    engine = VllmEngine(models, VllmSettings(kv_cache_gb=0.1, runner="async"), batch_max=8, template=QuickTemplate("async"))
    try:
        await engine.start()
        for _ in range(2):
            with pytest.raises(ModelLoadFailed, match=r"model a could not be loaded: .*SafetensorError: Error while deserializing header"):
                await engine.load_model("a", Tier.ACTIVE)
    finally:
        await engine.stop()
