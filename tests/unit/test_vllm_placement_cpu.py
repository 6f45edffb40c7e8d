"""The tiers of models on a CPU: processes side by side as far as host memory goes, else one that takes other weights in place. Over engine
processes that are threads (`sleeping_gpu`)."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import cast

import pytest

from qlm_agent.engines.port import Tier
from qlm_agent.engines.vllm.engine_runs import EngineRuns
from qlm_agent.engines.vllm.placement import Placement
from qlm_agent.engines.vllm.plans import VllmModel
from qlm_agent.engines.vllm.process.template import Template
from qlm_agent.engines.vllm.settings import VllmSettings
from sleeping_gpu import CONFIG, KV_BYTES, WEIGHTS_BYTES, Gpu, ThreadTemplate, model_folder

DEADLINE_S = 20.0


class Host:
    """A CPU with two models; `held`: models whose weights host memory has room for. The second model may be unlike the first."""

    def __init__(self, folder: Path, held: float, *, context_tokens: int, chat_template: str, layers: int) -> None:
        self.gpu = Gpu(models=2.0, weights_bytes=WEIGHTS_BYTES, kv_bytes=KV_BYTES)
        first, second = (model_folder(folder / name) for name in ("a", "b"))
        (Path(second) / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        models = {
            "a": VllmModel(name="a", weights=first, context_tokens_max=64),
            "b": VllmModel(name="b", weights=second, context_tokens_max=context_tokens, chat_template=chat_template),
        }
        self.placement = Placement(
            models,
            VllmSettings(kv_cache_gb=(KV_BYTES + 1) / 1e9, host_memory_gb=held * WEIGHTS_BYTES / 1e9),
            cast(Template, ThreadTemplate(self.gpu)),
            EngineRuns(),
            batch_max=4,
            n_gpu=1,
            on_step=lambda child, frame: None,
            on_end=lambda child, why: None,
        )

    async def swap(self) -> str:
        """Makes the one active and then the other; the first letters of their tiers."""
        for model in ("a", "b"):
            await self.placement.load(model, Tier.ACTIVE)
        return "".join(self.placement.tier(model).value[0] for model in ("a", "b"))


Make = Callable[..., Host]


@pytest.fixture
async def make(tmp_path: Path) -> AsyncIterator[Make]:
    made: list[Host] = []

    def make(held: float, *, context_tokens: int = 64, chat_template: str = "", layers: int = CONFIG["num_hidden_layers"]) -> Host:
        made.append(Host(tmp_path, held, context_tokens=context_tokens, chat_template=chat_template, layers=layers))
        return made[-1]

    yield make
    for host in made:
        await host.placement.stop()


async def test_a_model_that_host_memory_holds_keeps_its_process(make: Make) -> None:
    host = make(2.5)
    assert await host.swap() == "wa"
    assert (host.gpu.processes, host.gpu.reads, len(host.placement.children)) == (2, [], 2)


@pytest.mark.parametrize("held", [0.5, 1.5])
async def test_where_host_memory_holds_one_its_process_takes_the_others_weights(make: Make, held: float) -> None:
    host = make(held)
    assert await host.swap() == "ca"
    assert (host.gpu.processes, [Path(each).name for each in host.gpu.reads]) == (1, ["b"])
    assert [child.model for child in host.placement.children] == ["b"]


@pytest.mark.parametrize("unlike", [{"context_tokens": 32}, {"chat_template": "other.jinja"}, {"layers": 2}])
async def test_a_model_that_is_unlike_it_has_a_process_of_its_own(make: Make, unlike: dict[str, object]) -> None:
    host = make(1.5, **unlike)
    assert await host.swap() == "ca"
    assert (host.gpu.processes, host.gpu.reads) == (2, [])
    assert [child.model for child in host.placement.children] == ["b"]


async def test_a_warm_model_whose_process_ends_is_cold(make: Make) -> None:
    host = make(2.5)
    await host.swap()
    child = host.placement.child("a")
    assert child is not None
    child.kill("killed by the test")
    async with asyncio.timeout(DEADLINE_S):
        while not child.ended:
            await asyncio.sleep(0.001)
    assert (host.placement.tier("a"), host.placement.tier("b")) == (Tier.COLD, Tier.ACTIVE)


async def test_an_active_model_whose_process_ended_is_cold_once_another_is_active(make: Make) -> None:
    host = make(2.5)
    await host.placement.load("a", Tier.ACTIVE)
    child = host.placement.child("a")
    assert child is not None
    child.kill("killed by the test")
    async with asyncio.timeout(DEADLINE_S):
        while not child.ended or host.gpu.engines:  # it gave its memory back too
            await asyncio.sleep(0.001)
    await host.placement.load("b", Tier.ACTIVE)
    assert (host.placement.tier("a"), host.placement.tier("b")) == (Tier.COLD, Tier.ACTIVE)
    await host.placement.load("a", Tier.WARM)
    assert (host.placement.tier("a"), host.placement.child("a") is None) == (Tier.WARM, False)
