"""The same engine through vLLM's AsyncLLM, which has processes of its own."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from qlm_agent.engine import EngineRequest, FinishReason, Sampling, Tier, TokenPrompt
from qlm_agent.vllm.engine import VllmEngine
from qlm_agent.vllm.plans import VllmModel
from qlm_agent.vllm.settings import VllmSettings
from running_cluster import gone, wait_until

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
